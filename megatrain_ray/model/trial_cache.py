"""Caches what compiled layers keep for the backward: tracing them and importing the compiler takes seconds of a start.

A file is named by a hash of everything that the trace depends on: the model's configuration, shapes and rules, and the
versions and sources of the code that traces. Models with code of their own are not cached, because that code can change
without changing the hash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch._functorch import config as functorch_config

from megatrain_ray.engine.discovery.compile_trial import CompileTrial
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.model.model_source import ModelSource

log = logging.getLogger(__name__)

KEPT_FILES = 64  # files of at most about 100 KB each; older ones are deleted

Trials = tuple[CompileTrial | None, ...]
_TRIALS = TypeAdapter[Trials](Trials)


class TrialCache:
    """Caches the trials of one model in one shape."""

    def __init__(self, source: ModelSource, shape: Mapping[str, Any]) -> None:
        """Find the file of the trials.

        shape: all other arguments of `discover`, as objects that `repr` shows completely.
        """
        self._file: Path | None = None
        if source.code is None:
            model = dict(source.config), repr(source.lora)
            key = json.dumps([*model, sorted(map(repr, shape.items())), _versions()], default=repr)
            name = hashlib.sha256(key.encode()).hexdigest()[:24]
            with suppress(RuntimeError):  # a user without a home has no cache
                self._file = cache_folder() / "trials" / f"{name}.json"

    def read(self) -> Trials | None:
        """Return the cached trials; None if there are none, or none that can be read."""
        try:
            return _TRIALS.validate_json(self._file.read_bytes()) if self._file else None
        except (OSError, ValidationError):
            return None

    def write(self, trials: Trials) -> None:
        """Cache the trials, unless a layer could not be compiled: such a failure may be temporary."""
        if self._file is None or any(trial and trial.problem for trial in trials):
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, _TRIALS.dump_json(trials).decode())
            newest_first = sorted(self._file.parent.glob("*.json"), key=lambda file: -file.stat().st_mtime)
            for file in newest_first[KEPT_FILES:]:
                file.unlink(missing_ok=True)
        except (OSError, MegatrainError) as error:
            log.info("what compiled layers keep is not kept: %s", error)


@cache
def _versions() -> list[str]:
    """Return the versions of everything that traces.

    Of this package it is a hash of every source, since a checkout changes without changing its version.
    """
    import transformers

    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.read_bytes())
    cpu = platform.machine(), torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, transformers.__version__, *cpu, functorch_config.get_hash().hex(), digest.hexdigest()]


def sources() -> list[Path]:
    """Return the source files of this package."""
    package = Path(__file__).parents[1]
    return sorted([*package.glob("*.py"), *package.glob("*/**/*.py")])  # a leading ** would not enter linked folders
