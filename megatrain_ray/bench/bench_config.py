"""Builds the configuration of a benchmark: a given length, and nothing besides steps. Imports neither torch nor Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.errors import ConfigError

# Nothing is saved, evaluated or sent anywhere. The learning rate does not affect the time of a step.
SETTINGS = (
    "train.epochs=null", "train.warmup_steps=0", "train.schedule=constant", "save_every=null", "save_keep_every=null",
    "save_best=false", "save_mirror=null", "eval_every=0", "eval_patience=null", "resume=false",
)  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """Holds the options of `megatrain bench`.

    warmup: number of steps before the measured ones.
    steps: number of measured steps.
    with_trace: whether one more step follows, which is traced.
    commit: commit of the code, if it is not run from a checkout.
    alias_bytes: host memory that all layers share in turn (aliased_memory.py); None: each layer has its own.
    """

    warmup: int
    steps: int
    compare_in_process: bool = False
    with_ceiling: bool = True
    with_trace: bool = True
    commit: str | None = None
    alias_bytes: int | None = None

    @property
    def measured(self) -> slice:
        """Return the range of rows that are measured."""
        return slice(self.warmup, self.warmup + self.steps)

    @property
    def num_steps(self) -> int:
        """Return the number of steps in all, with warm-up and traced step."""
        return self.warmup + self.steps + self.with_trace


def bench_config(path: Path, overrides: Sequence[str], options: BenchOptions, run_dir: Path) -> TrainConfig:
    """Return the configuration at `path` with `overrides` and with the settings that every benchmark makes.

    run_dir: run directory unless an override names another. The file's own is not used: it may hold a run.

    Raises ConfigError if the configuration is invalid, if no step would be measured, or if an override changes a
    setting that the benchmark makes.
    """
    if options.warmup < 0 or options.steps < 1:
        raise ConfigError(f"--warmup {options.warmup} --steps {options.steps}: expected 0 or more, and at least 1")
    last = options.num_steps
    trace = f"[{last}, {last}]" if options.with_trace else "null"
    own = (*SETTINGS, f"train.steps={last}", f"log={{tensorboard: false, trace: {trace}}}")
    keys = {_key(setting) for setting in own}
    for key in map(_key, overrides):
        if key in keys or key.startswith("log."):
            raise ConfigError(f"{key}: a benchmark sets it itself; leave it out (--warmup and --steps say how long)")
    config = load_config(path, [f"run_dir={json.dumps(str(run_dir))}", *overrides, *own])
    if options.compare_in_process and config.hardware.num_gpus > 1:
        raise ConfigError(
            f"hardware.num_gpus: {config.hardware.num_gpus}, and one process works on one GPU; leave "
            "--compare-in-process out"
        )
    return config


def _key(override: str) -> str:
    return override.partition("=")[0]
