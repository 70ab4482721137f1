"""Opens a run directory for a start: checks it, and writes everything in it but what actors write."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatrain_ray.config.resume_changes import resume_diff, train_changes
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import dump_config, shown
from megatrain_ray.console.logs import say
from megatrain_ray.errors import ConfigError, DamagedSaveError, MegatrainError
from megatrain_ray.io.chat.chat_template import TEMPLATE_NAME, load_chat_template
from megatrain_ray.io.checkpoints.leftovers import leads_away, without_links
from megatrain_ray.io.files.atomic_file import left_by_kills, sync, write_atomically
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import MARK_NAME, FolderKind, OwnedFolder, has_mark, is_free, remove_owned
from megatrain_ray.io.files.partial_folder import complete_or_absent, remove_abandoned
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import (
    clean_unfinished,
    in_the_way,
    list_saves,
    load_manifest,
    set_aside,
    why_kept,
)
from megatrain_ray.io.tokens.rebuilt_tokenizer import write_whole
from megatrain_ray.io.tokens.tokenizer import ADDITIONAL_TEMPLATES, tokenizer_files
from megatrain_ray.run.best_evaluation import best_evaluation, why_ended_early
from megatrain_ray.run.fetch_run import fetch_newer
from megatrain_ray.run.run_files import (
    REPORT_NAME,
    STREAM_NAME,
    RunFiles,
    append_row,
    hash_file,
    other_settings,
    read_damaged,
    read_steps,
)
from megatrain_ray.run.run_history import HISTORY_NAME
from megatrain_ray.run.run_lock import PRIVATE, hold_lock
from megatrain_ray.run.run_model import MODEL_NAME
from megatrain_ray.run.run_processes import PROCESSES_NAME

log = logging.getLogger(__name__)

# Files that a run overwrites in its directory, and folders that it creates there.
FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "evaluations.jsonl", HISTORY_NAME, MODEL_NAME, PROCESSES_NAME,
    REPORT_NAME, MARK_NAME,
)  # fmt: skip
FOLDERS = ("plans", "saves", "tokenizer", "inputs", "rollouts", STREAM_NAME)


class RunDir(RunFiles):
    """Represents a run directory in use: the lock is held, and `config` is resolved and may run in it."""

    def __init__(self, path: Path, config: TrainConfig, token: str) -> None:
        """Use `open` instead."""
        super().__init__(path)
        self.config = config
        self.token = token

    @staticmethod
    @contextmanager
    def open(config: TrainConfig) -> Iterator[RunDir]:
        """Lock `config.run_dir` for the block, and check that `config` may start or resume the run there.

        Writes nothing but the lock; if the block writes nothing either, nothing stays behind. Raises ConfigError if the
        directory is in use or cannot be written to, holds a run that must not be resumed or not with these settings, or
        holds files that no run wrote or saves of another run.
        """
        files = RunFiles(Path(config.run_dir).absolute())
        with hold_lock(files.path):
            earlier = files.read_config() if files.holds_run and files.has_begun else None
            if earlier is None:
                _check_free(files.path)
            else:
                _check_resume(files.path, earlier, config)
            _check_kinds(files)
            if _has_fetched(files, config):
                earlier = files.read_config()
            token = _token(files)
            if left := in_the_way(files.saves, token):
                raise ConfigError(f"run_dir: {left[0]}; move it away, and start again")
            yield RunDir(files.path, config.resolve(earlier), token)

    def newest_save(self) -> Manifest | None:
        """Return the manifest of the newest save that can be read; None if there is no save.

        Raises DamagedSaveError if there are saves and none of them can be read, ConfigError for a save of another run.
        """
        for step in reversed(list_saves(self.saves)):
            try:
                manifest = load_manifest(self.saves, step)
            except DamagedSaveError as damage:
                self.fall_back(step, damage)
            else:
                self.check_save(step, manifest)
                return manifest
        return None

    def fall_back(self, step: int, damage: DamagedSaveError) -> None:
        """Set a damaged save aside, to go on from the one before. Raises DamagedSaveError if there is none."""
        earlier = [saved for saved in list_saves(self.saves) if saved < step]
        if not earlier:
            raise DamagedSaveError(
                f"{damage}; there is no earlier save to go back to: repair it, or delete {self.saves} to start from "
                "step 0"
            )
        aside = set_aside(self.saves, step)
        say(f"warning: {damage}; it is kept as {aside.name}, training goes on from the save of step {earlier[-1]}")

    def kept_for_ever(self, steps: Collection[int]) -> set[int]:
        """Return those of the saves of `steps` that are kept however old they are."""
        every = self.config.save_keep_every
        best = best_evaluation(self.evaluations(), steps) if self.config.save_best else None
        return {step for step in steps if (every and step % every == 0) or (best and step == best["step"])}

    def early_end(self, step: int) -> str | None:
        """Return why the run has ended early, going by the evaluations up to `step`; None if it has not."""
        if step >= self.config.train.num_steps:
            return None
        made = [row for row in self.evaluations() if row["step"] <= step]
        return why_ended_early(made, self.config.eval_patience)

    def clean_after_end(self) -> None:
        """Delete unfinished saves, and the portions of a stream if the last step is saved.

        Call it when every process has ended, so that nobody writes them.
        """
        with suppress(MegatrainError, OSError):  # the error that ended the run must be reported
            clean_unfinished(self.saves, self.token)
            last = max(list_saves(self.saves), default=0)
            if last and (last >= self.config.train.num_steps or self.early_end(last)):
                remove_owned(self.path / STREAM_NAME, FolderKind.RUN_PART)

    def changes_since(self, manifest: Manifest | None) -> dict[str, tuple[Any, Any]]:
        """Return the settings of `train` that were others when a save was made, as {key: (before, now)}."""
        if manifest is None:
            return {}
        with suppress(ConfigError):  # of an earlier release, with a key that this one does not have
            return train_changes(TrainConfig.model_validate(manifest.config), self.config)
        return {}

    def report_resume(self, manifest: Manifest | None) -> None:
        """Print what going on from a save means, or that training begins again without one."""
        if manifest is None:
            if rows := self.rows():
                say(f"warning: no save of the {len(rows)} steps in metrics.jsonl is there: training begins again")
            return
        step = manifest.step
        num_again = sum(row["step"] > step for row in self.rows())
        again = f"; {num_again} steps that were not saved are made again" if num_again else ""
        say(f"resuming from the save of step {step}{again}")
        if missing := self.missing_rows(step):
            say(
                f"warning: metrics.jsonl has no rows of {len(missing)} of the {step} steps up to that save, the first "
                f"of them step {missing[0]}: they were deleted; training is not changed by it"
            )
        for saved in list_saves(self.saves):
            if reason := why_kept(self.saves, saved, self.token):
                say(f"note: {reason}; save_keep does not count it")
        if changes := self.changes_since(manifest):
            listed = (f"{key} {shown(before)} -> {shown(now)}" for key, (before, now) in changes.items())
            say(f"resumed with {', '.join(listed)}: from step {step + 1} on")

    def missing_rows(self, step: int) -> list[int]:
        """Return those of the first `step` updates without a row of metrics. Before a save, somebody deleted them."""
        there = {row["step"] for row in self.rows()}
        return [number for number in range(1, step + 1) if number not in there]

    def clean(self) -> list[Path]:
        """Delete the saves, replaced files and exports that a dead run left unfinished, and return their paths."""
        traces = [file.name.split(".", 1)[1].rsplit(".", 2)[0] for file in self.path.glob(".trace_steps_*.new")]
        left = left_by_kills(self.path, [*FILES, *traces]) if has_mark(self.path, FolderKind.RUN) else []
        for file in left:
            file.unlink()
        unfinished = clean_unfinished(self.saves, self.token)
        return [*left, *unfinished, *remove_abandoned(self.saves), *remove_abandoned(self.path)]

    def claim(self) -> None:
        """Write the mark of a run into the directory, before anything else is. Raises MegatrainError."""
        if not has_mark(self.path, FolderKind.RUN):
            with explained("write", self.path / MARK_NAME):
                OwnedFolder.mark_existing(self.path, FolderKind.RUN, self.token).release()

    def begin(self, plan_json: str, step: int) -> None:
        """Make the directory hold a run that goes on after `step` updates.

        Each file changes atomically, config.yaml last. The first begin of a run closes the directory to all but its
        owner. If the owner opens it to others later, a resume leaves it so.
        """
        if not self.has_begun:
            self._close()
        self.claim()
        for folder in (self.saves, self.logs):
            with explained("make", folder):
                folder.mkdir(exist_ok=True)
        self._keep_plan(plan_json)
        self._cut(step)
        write_atomically(self.plan_file, plan_json)
        write_atomically(self.config_file, dump_config(self.config))

    def _close(self) -> None:
        try:
            self.path.chmod(PRIVATE)
        except OSError as error:  # another owner, or a file system without modes
            log.warning("%s may be open to other users: %s", self.path, error)

    def _keep_plan(self, plan_json: str) -> None:
        """Keep the plan of an earlier start if the new one differs: rows and measurements of that start refer to it."""
        if self.plan_file.exists() and self.has_begun and (earlier := read_damaged(self.plan_file)) != plan_json:
            file = self.earlier_plan(hash_file(self.plan_file))
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, earlier)

    def keep_tokenizer(self) -> None:
        """Copy the tokenizer's files and the chat template that is used, unless the run has begun with others.

        Raises ConfigError, MegatrainError.
        """
        if self.has_begun and self.tokenizer.exists():
            return
        files, template = tokenizer_files(self.config.tokenizer), self._chat_template()
        if not is_free(self.tokenizer):  # of a start with other settings
            remove_owned(self.tokenizer, FolderKind.RUN_PART)
        for link in (file for file in files if leads_away(file, file.parent)):
            say(f"note: {link} is a link to {link.resolve()}, which is copied into the run and its exports")
        if files or template is not None:
            with complete_or_absent(self.tokenizer, FolderKind.RUN_PART) as folder:
                for file in files:
                    shutil.copy(file, folder)
                if self.config.data.kind != "tokens" and files and files[0].name != "tokenizer.json":
                    write_whole(files[0].parent, folder)
                if template is not None:
                    (folder / TEMPLATE_NAME).write_text(template, encoding="utf-8")
                else:
                    _copy_templates(files[0].parent, folder / ADDITIONAL_TEMPLATES)

    def _chat_template(self) -> str | None:
        """Return the chat template unless it is the tokenizer's own: an exported model must be prompted with it."""
        data = self.config.data
        if not data.has_chats:
            return None
        template = load_chat_template(self.config.tokenizer, data.chat_template, data.chat_template_args)
        return None if template.is_own else template.source

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics; non-finite numbers become null. Raises MegatrainError."""
        with explained("write", self.metrics_file):
            append_row(self.metrics_file, row)

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Add a row of evaluations, in the same way as `append`."""
        with explained("write", self.evaluations_file):
            append_row(self.evaluations_file, row)

    def flush(self) -> None:
        """Flush the rows to disk. Raises MegatrainError."""
        for file in (self.metrics_file, self.evaluations_file):
            if file == self.metrics_file or file.exists():
                with explained("write", file):
                    sync(file)

    def _cut(self, step: int) -> None:
        """Delete the rows after `step`, since training goes on from there and writes them again."""
        last_evaluated = step if step else -1  # a start that made no step may have had other settings
        for file, last in ((self.metrics_file, step), (self.evaluations_file, last_evaluated)):
            if file.exists():
                kept = [json.dumps(row) + "\n" for row in read_steps(file) if row["step"] <= last]
                write_atomically(file, "".join(kept))


def _copy_templates(source: Path, folder: Path) -> None:
    """Copy the additional chat templates of a tokenizer's folder, unless they are links to places outside of it."""
    copies, note = without_links(sorted((source / ADDITIONAL_TEMPLATES).glob("*.jinja")), source)
    if note:
        say(note)
    for file in copies:
        folder.mkdir(exist_ok=True)
        shutil.copy(file, folder)


def _check_free(path: Path) -> None:
    """Raise ConfigError if a directory that is no run's holds something that a run would overwrite."""
    if has_mark(path, FolderKind.RUN):
        return
    found = [name for name in FILES if os.path.lexists(path / name)]
    if MARK_NAME in found and not (path / MARK_NAME).lstat().st_size:
        found.remove(MARK_NAME)  # a start was killed before it wrote the mark
    # Folders that an earlier start made have a mark, and may be used again.
    found += [name for name in FOLDERS if not is_free(path / name) and not has_mark(path / name, FolderKind.RUN_PART)]
    if found:
        raise ConfigError(
            f"run_dir: {path} holds {found[0]}, and no run that has begun: nothing there is overwritten; move it away, "
            "or choose another run_dir"
        )


def _has_fetched(files: RunFiles, config: TrainConfig) -> bool:
    """Fetch a newer save from the mirror, if there is one, and return whether there was. Raises as fetch_newer."""
    url = config.save_mirror
    return url is not None and fetch_newer(files, url, lambda earlier: _check_resume(url, earlier, config))


def _check_kinds(files: RunFiles) -> None:
    """Raise ConfigError if something in a run directory is no folder that must be one, or is a folder and must not."""
    for folder in (files.saves, files.logs, files.path / "plans"):
        if os.path.lexists(folder) and not folder.is_dir():
            raise ConfigError(f"run_dir: {folder} is no folder, or a link to none: is its disk mounted?")
    for name in FILES:
        if (files.path / name).is_dir():
            raise ConfigError(f"run_dir: {files.path / name} is a folder, and a run writes a file there; move it away")


def _token(files: RunFiles) -> str:
    """Return the token of the run: that of its directory, or else of its newest save, or a new one."""
    saved: str | None = None
    if files.holds_run and (steps := list_saves(files.saves)):
        with suppress(MegatrainError):  # damaged, or of another run: what is done then is decided where it is loaded
            manifest = load_manifest(files.saves, steps[-1])
            saved = None if other_settings(manifest, files.read_config()) else manifest.run
    return files.read_token() or saved or secrets.token_hex(16)


def _check_resume(path: Path | str, earlier: TrainConfig, config: TrainConfig) -> None:
    if not config.resume:
        raise ConfigError(f"resume is false, but {path} holds a run; set resume: true, or choose another run_dir")
    if diff := resume_diff(earlier, config):
        message = f"{path} holds a run with other settings; set them back, or choose another run_dir:"
        splits = any(line.startswith("data.eval_fraction:") for line in diff)
        advice = ["data.eval_path=FILE gives a run that has begun other held-out data"] * splits
        raise ConfigError(message, *(f"  {line}" for line in diff), *advice)
