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
rollouts/      what the run has sampled itself, and its tokens (rollouts/run_rollouts.py)
stream/        portions of data that are read as a stream, while it runs (data/stream_folder.py)
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
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain_ray.config.resume_changes import resume_diff
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config, read_settings
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.disk_errors import UnreadableError, explained
from megatrain_ray.io.files.owned_folder import MARK_NAME, FolderKind, read_mark
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import list_saves
from megatrain_ray.read_file import parse_json, regular_file
from megatrain_ray.run.best_evaluation import best_evaluation
from megatrain_ray.run.run_lock import lock_holder
from megatrain_ray.run.run_model import check_saved

REPORT_NAME = "report.html"
STREAM_NAME = "stream"  # folder of the portions of data that are read as a stream

Row = dict[str, Any]


class RunFiles:
    """Names the files of a run and reads them. Reading needs no lock."""

    def __init__(self, path: Path) -> None:
        """Name the files in directory `path`, which is absolute: actors have other working directories."""
        self.path = path
        self.config_file = path / "config.yaml"
        self.plan_file = path / "plan.json"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluations_file = path / "evaluations.jsonl"
        self.saves = path / "saves"
        self.tokenizer = path / "tokenizer"
        self.logs = path / "logs"

    def read_plan(self, sha256: str | None = None) -> Plan | None:
        """Return the plan of the newest start, or that of any start by its hash; None if it cannot be read."""
        try:
            for file in (self.plan_file, *([self.earlier_plan(sha256)] if sha256 else [])):
                if file.exists() and sha256 in (None, hash_file(file)):
                    return Plan.from_json(read_damaged(file))
        except (OSError, ValidationError):
            pass
        return None

    def earlier_plan(self, sha256: str) -> Path:
        return self.path / "plans" / f"{sha256[:12]}.json"

    def tokenizer_files(self) -> tuple[Path, ...]:
        """Return the files of the tokenizer that the run was started with, and files and folder of its templates."""
        files = self.tokenizer.iterdir() if self.tokenizer.is_dir() else ()
        return tuple(sorted(file for file in files if file.name != MARK_NAME))

    @property
    def last_evaluated(self) -> int:
        """Return the number of updates before the newest evaluation; -1: none was made."""
        return max((row["step"] for row in self.evaluations()), default=-1)

    @property
    def best_save(self) -> int | None:
        """Return the step of the save with the least held-out loss; None if no save was evaluated."""
        best = best_evaluation(self.evaluations(), list_saves(self.saves))
        return None if best is None else int(best["step"])

    @property
    def holds_run(self) -> bool:
        return self.config_file.exists()

    @property
    def is_starting(self) -> bool:
        """Return whether a process prepares the first start of a run here, which has written nothing yet."""
        return not self.holds_run and lock_holder(self.path) is not None

    @property
    def has_begun(self) -> bool:
        """Return whether deleting the run would lose something: a save or a row of metrics. Raises MegatrainError."""
        return bool(list_saves(self.saves)) or bool(self.rows())

    def read_config(self) -> TrainConfig:
        """Return the configuration of the run. Raises ConfigError if there is none, or none valid in this version."""
        if self.is_starting:
            raise ConfigError(f"{self.path}: the run is starting and holds nothing yet; look again in some seconds")
        if not self.holds_run:
            raise ConfigError(no_run(self.path))
        return load_config(self.config_file).as_begun()

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
            others = other_settings(manifest, self.read_config())
            is_own = not others
        else:
            is_own = token == manifest.run
        if is_own and manifest.step == step:
            return check_saved(self.path, manifest)
        whose = f"of step {manifest.step} of the run in {manifest.config.get('run_dir', 'an unknown place')}"
        raise ConfigError(
            f"{self.saves / f'step_{step}'} is the save {whose}{others}: move it away; to go on with that run, name "
            "its directory, or a copy of all of it"
        )

    def rows(self) -> list[Row]:
        """Return the rows of metrics, in order of steps. Raises MegatrainError."""
        return read_steps(self.metrics_file)

    def evaluations(self) -> list[Row]:
        """Return the rows of evaluations, read in the same way as `rows`."""
        return read_steps(self.evaluations_file)


def no_run(path: Path) -> str:
    """Return the message about a path that is no run directory, with the directory that is meant if it is a YAML."""
    if path.is_file():
        with suppress(ConfigError):
            named = read_settings(path).get("run_dir")
            if isinstance(named, str) and named:
                return f"{path} is a configuration, not the directory of its run; name that: {named}"
        return f"{path} is a file; expected the directory of a run, which holds a config.yaml"
    return f"{path} holds no run: config.yaml is missing; name the run_dir of one"


def read_steps(file: Path) -> list[Row]:
    """Return the rows of a file that have a step; none if there is no file. Raises MegatrainError."""
    try:
        with explained("read", file):
            text = read_damaged(file)
    except UnreadableError:
        if file.exists():
            raise
        return []
    return parse_rows(text, lambda row: type(row.get("step")) is int)


def other_settings(manifest: Manifest, config: TrainConfig) -> str:
    """Return a text with the first setting that differs in a save and that a resumed run may not change; else empty."""
    try:
        found = resume_diff(TrainConfig.model_validate(manifest.config).as_begun(), config)
    except ConfigError as error:
        found = [str(error).splitlines()[0]]
    return f" ({found[0]})" if found else ""


def read_damaged(file: Path) -> str:
    """Return the text of a file, even of a damaged one. Raises OSError."""
    return regular_file(file).read_text(encoding="utf-8", errors="replace")


def hash_file(file: Path) -> str:
    return hashlib.sha256(regular_file(file).read_bytes()).hexdigest()


def parse_rows(text: str, is_row: Callable[[Row], bool]) -> list[Row]:
    """Return the rows of a file with one JSON object per line. A line that is none is left out: a kill can tear it."""
    rows = []
    for line in text.splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and is_row(row):
            rows.append(row)
    return rows


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Add a row; non-finite numbers become null. Raises OSError."""
    line = json.dumps(_finite(row), allow_nan=False) + "\n"
    with file.open("a", encoding="utf-8") as rows:
        rows.write(line)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
