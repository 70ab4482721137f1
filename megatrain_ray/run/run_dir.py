"""Keeps a run directory: what a run is (config.yaml, plan.json), how it went (metrics.jsonl), and its saves and logs.

owner.json     says that this program made the directory; holds the token of the run, which its saves have too
config.yaml    resolved configuration; a directory with this file holds a run
plan.json      plan of the newest start, written before its first step
plans/         other plans of earlier starts, named by their hash
model.json     the model's configuration and shapes, which a resume must have too
processes.json process ids, while the run is up and after a death
metrics.jsonl  one row per update, in order of steps
evaluations.jsonl  one row per evaluation, in order of steps
history.jsonl  starts, deaths, ends (run_history.py)
saves/step_N/  weights and optimizer state after N updates
tokenizer/     the tokenizer's files and the chat template, which an export copies
inputs/        model and data that a program passed as objects (data/python_objects.py)
report.html    all of this as a page (report/html_report.py), written at the end of a start
trace_steps_*  timelines (accounting/trace_file.py)
logs/          driver.log: starts, steps, saves, failures with their tracebacks
lock           held while the run is in use
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import dump_config, load_config, resume_diff
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.chat.chat_template import TEMPLATE_NAME, load_chat_template
from megatrain_ray.io.files.atomic_file import left_by_kills, write_atomically
from megatrain_ray.io.files.disk_errors import UnreadableError, explained
from megatrain_ray.io.files.durable import sync
from megatrain_ray.io.files.owned_folder import (
    MARK_NAME,
    FolderKind,
    OwnedFolder,
    has_mark,
    is_free,
    read_mark,
    remove_owned,
)
from megatrain_ray.io.files.partial_folder import complete_or_absent, remove_abandoned
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import clean_unfinished, in_the_way, list_saves, load_manifest, why_kept
from megatrain_ray.io.tokens.tokenizer import tokenizer_files
from megatrain_ray.run.run_history import HISTORY_NAME
from megatrain_ray.run.run_lock import PRIVATE, hold_lock
from megatrain_ray.run.run_model import MODEL_NAME
from megatrain_ray.run.run_processes import PROCESSES_NAME

log = logging.getLogger(__name__)

REPORT_NAME = "report.html"


@dataclass(frozen=True)
class RunFiles:
    """Names the files of a run and reads them. Reading needs no lock."""

    path: Path  # absolute: actors have other working directories

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    def read_plan(self, sha256: str | None = None) -> Plan | None:
        """Return the plan of the newest start, or that of any start by its hash.

        None if there is no such plan, or this version cannot read it.
        """
        try:
            file = self.plan_file if sha256 is None else self._plan_file_of(sha256)
            return Plan.from_json(_text(file)) if file else None
        except (OSError, ValidationError):
            return None

    def _plan_file_of(self, sha256: str) -> Path | None:
        candidates = (self.plan_file, self._earlier_plan(sha256))
        return next((file for file in candidates if file.exists() and _sha256(file) == sha256), None)

    def _earlier_plan(self, sha256: str) -> Path:
        return self.path / "plans" / f"{sha256[:12]}.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations_file(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def saves(self) -> Path:
        return self.path / "saves"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def tokenizer_files(self) -> tuple[Path, ...]:
        """Return the files of the tokenizer that the run was started with, and of the chat template if there is one.

        With `bytes` there is at most the chat template.
        """
        files = self.tokenizer.iterdir() if self.tokenizer.is_dir() else ()
        return tuple(sorted(file for file in files if file.name != MARK_NAME))

    @property
    def last_evaluated(self) -> int:
        """Return the number of updates before the newest evaluation; -1: none was made."""
        return max((row["step"] for row in self.evaluations()), default=-1)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def holds_run(self) -> bool:
        return self.config_file.exists()

    @property
    def has_begun(self) -> bool:
        """Return whether deleting the run would lose something: a save or a row of metrics. Raises MegatrainError."""
        return bool(list_saves(self.saves)) or bool(self.rows())

    def read_config(self) -> TrainConfig:
        """Return the configuration of the run.

        Raises ConfigError if there is no run, or its configuration is not valid in this version.
        """
        if not self.holds_run:
            raise ConfigError(f"{self.path} holds no run: {self.config_file.name} is missing; name the run_dir of one")
        return load_config(self.config_file)

    def read_token(self) -> str | None:
        """Return the token of the run, which its saves have too; None in a directory of an earlier release."""
        mark = read_mark(self.path)
        return mark.token if mark is not None and mark.kind is FolderKind.RUN else None

    def check_save(self, step: int, manifest: Manifest) -> None:
        """Raise ConfigError if a save is of another run, or of another step than the name of its folder says.

        A save of an earlier release names no run. It counts as this run's if it was made with the settings of this run.
        """
        token, others = self.read_token(), ""
        if token is None or manifest.run is None:  # of an earlier release, or the mark was deleted
            others = _other_settings(manifest, self.read_config())
        is_own = not others if token is None or manifest.run is None else token == manifest.run
        if is_own and manifest.step == step:
            return
        whose = f"of step {manifest.step} of the run in {manifest.config.get('run_dir', 'an unknown place')}"
        raise ConfigError(
            f"{self.saves / f'step_{step}'} is the save {whose}{others}: move it away; to go on with that run, name "
            "its directory, or a copy of all of it"
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics, without lines that are no rows, since a kill can tear the last one.

        Raises MegatrainError.
        """
        return _read_rows(self.metrics_file)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations, read in the same way as `rows`."""
        return _read_rows(self.evaluations_file)


@dataclass(frozen=True)
class RunDir(RunFiles):
    """A run directory in use: the lock is held, and `config` is resolved and may run in it.

    token: of the run.
    """

    config: TrainConfig
    token: str

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
            if os.path.lexists(files.saves) and not files.saves.is_dir():
                raise ConfigError(f"run_dir: {files.saves} is no folder, or a link to none: is its disk mounted?")
            token = _token(files)
            if left := in_the_way(files.saves, token):
                raise ConfigError(f"run_dir: {left[0]}; move it away, and start again")
            yield RunDir(files.path, config.resolve(earlier), token)

    def kept_saves(self) -> list[str]:
        """Return a text for each save that `save_keep` does not count and that is never deleted, with the reason."""
        reasons = (why_kept(self.saves, step, self.token) for step in list_saves(self.saves))
        return [reason for reason in reasons if reason]

    def missing_rows(self, step: int) -> list[int]:
        """Return those of the first `step` updates that have no row of metrics.

        Rows are written before a save is, so rows up to a save are missing only if somebody deleted them.
        """
        there = {row["step"] for row in self.rows()}
        return [number for number in range(1, step + 1) if number not in there]

    def clean(self) -> list[Path]:
        """Delete what a dead run left unfinished, and return what was deleted.

        That is saves, replaced files, and exports into this folder.
        """
        names = [file.name for file in (self.config_file, self.plan_file, self.metrics_file, self.evaluations_file)]
        names += [MODEL_NAME, PROCESSES_NAME, REPORT_NAME]
        traces = [file.name.split(".", 1)[1].rsplit(".", 2)[0] for file in self.path.glob(".trace_steps_*.new")]
        left = left_by_kills(self.path, [*names, *traces]) if has_mark(self.path, FolderKind.RUN) else []
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
        with explained("make", self.saves):
            self.saves.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
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
        if not (self.plan_file.exists() and self.has_begun):
            return
        earlier = _text(self.plan_file)
        if earlier != plan_json:
            file = self._earlier_plan(_sha256(self.plan_file))
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, earlier)

    def keep_tokenizer(self) -> None:
        """Copy the tokenizer's files into the directory, with the chat template that is used.

        Once the run has begun they stay as they are. Raises ConfigError, MegatrainError.
        """
        if self.has_begun and self.tokenizer.exists():
            return
        files, template = tokenizer_files(self.config.tokenizer), self._chat_template()
        if not is_free(self.tokenizer):  # of a start with other settings
            remove_owned(self.tokenizer, FolderKind.RUN_PART)
        if files or template is not None:
            with complete_or_absent(self.tokenizer, FolderKind.RUN_PART) as folder:
                for file in files:
                    shutil.copy(file, folder)
                if template is not None:
                    (folder / TEMPLATE_NAME).write_text(template, encoding="utf-8")

    def _chat_template(self) -> str | None:
        """Return the chat template unless it is the tokenizer's own: an exported model must be prompted with it."""
        data = self.config.data
        if data.kind != "sft":
            return None
        template = load_chat_template(self.config.tokenizer, data.chat_template, data.chat_template_args)
        return None if template.is_own else template.source

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics; non-finite numbers become null. Raises MegatrainError."""
        _append(self.metrics_file, row)

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Add a row of evaluations, in the same way as `append`."""
        _append(self.evaluations_file, row)

    def settle(self) -> None:
        """Flush the rows to disk. Raises MegatrainError."""
        files = [self.metrics_file, *([self.evaluations_file] if self.evaluations_file.exists() else [])]
        for file in files:
            with explained("write", file):
                sync(file)

    def _cut(self, step: int) -> None:
        """Delete the rows after `step`, since training goes on from there and writes them again.

        With `step` 0 all evaluations go: a start that made no step may have had other settings.
        """
        last_evaluated = step if step else -1
        for file, last in ((self.metrics_file, step), (self.evaluations_file, last_evaluated)):
            if file.exists():
                kept = [json.dumps(row) + "\n" for row in _read_rows(file) if row["step"] <= last]
                write_atomically(file, "".join(kept))


# Files that a run overwrites in its directory, and folders that it creates there.
FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "evaluations.jsonl", HISTORY_NAME, MODEL_NAME, PROCESSES_NAME,
    REPORT_NAME, MARK_NAME,
)  # fmt: skip
FOLDERS = ("plans", "saves", "tokenizer", "inputs")


def _check_free(path: Path) -> None:
    """Raise ConfigError if a directory that is no run's holds something that a run would overwrite."""
    if has_mark(path, FolderKind.RUN):
        return
    found = [name for name in FILES if os.path.lexists(path / name)]
    if MARK_NAME in found and not (path / MARK_NAME).lstat().st_size:
        found.remove(MARK_NAME)  # a start was killed before it wrote the mark
    found += [name for name in FOLDERS if _is_taken(path / name)]
    if found:
        raise ConfigError(
            f"run_dir: {path} holds {found[0]}, and no run that has begun: nothing there is overwritten; move it away, "
            "or choose another run_dir"
        )


def _is_taken(folder: Path) -> bool:
    """Return whether something lies in a folder that no start of a run made."""
    return not is_free(folder) and not has_mark(folder, FolderKind.RUN_PART)


def _other_settings(manifest: Manifest, config: TrainConfig) -> str:
    """Return a text with the first setting in which a save differs from the run though a run may not change it.

    Empty if there is none.
    """
    try:
        found = resume_diff(TrainConfig.model_validate(manifest.config), config)
    except ConfigError as error:
        found = [str(error).splitlines()[0]]
    return f" ({found[0]})" if found else ""


def _token(files: RunFiles) -> str:
    """Return the token of the run: that of its directory, or else of its newest save, or a new one."""
    saved: str | None = None
    if files.holds_run and (steps := list_saves(files.saves)):
        with suppress(MegatrainError):  # damaged, or of another run: what is done then is decided where it is loaded
            manifest = load_manifest(files.saves, steps[-1])
            saved = None if _other_settings(manifest, files.read_config()) else manifest.run
    return files.read_token() or saved or secrets.token_hex(16)


def _text(file: Path) -> str:
    """Return the text of a file, even a damaged one: a run needs nothing that is in a plan of an earlier start."""
    return file.read_text(encoding="utf-8", errors="replace")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_resume(path: Path, earlier: TrainConfig, config: TrainConfig) -> None:
    if not config.resume:
        raise ConfigError(f"resume is false, but {path} holds a run; set resume: true, or choose another run_dir")
    if diff := resume_diff(earlier, config):
        lines = "".join(f"\n  {line}" for line in diff)
        raise ConfigError(f"{path} holds a run with other settings; set them back, or choose another run_dir:{lines}")


def _read_rows(file: Path) -> list[dict[str, Any]]:
    try:
        with explained("read", file):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except UnreadableError:
        if file.exists():
            raise
        return []
    return [row for line in lines if (row := _parse_row(line))]


def _append(file: Path, row: Mapping[str, Any]) -> None:
    line = json.dumps(_finite(row), allow_nan=False) + "\n"
    with explained("write", file), file.open("a", encoding="utf-8") as rows:
        rows.write(line)


def _parse_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
