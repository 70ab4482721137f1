"""Defines what all attempts at a run have in common, and checks the files that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain_ray.console.interrupts import Interrupts
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import Startup
from megatrain_ray.crew.ray_cluster import Daemons
from megatrain_ray.crew.recovery import FailureBudget
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.data.data_worker import HeldOutData, naming_held_out, open_stream
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.driver.callbacks import Callbacks
from megatrain_ray.engine.discovery.packing_check import check_packing
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.tokens.tokenizer import tokenizer_files
from megatrain_ray.metrics.sinks import check_packages
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.run.run_dir import RunDir


@dataclass(frozen=True)
class RunContext:
    """Holds what all attempts at a run have in common."""

    run_spec: RunSpec
    tokens: tuple[Path, ...]  # folders of the tokens of the data's sources
    num_rows: int  # rows in an epoch of them
    held_out: HeldOutData | None
    run: RunDir
    interrupts: Interrupts
    daemons: Daemons
    startup: Startup
    failures: FailureBudget  # of all attempts together
    callbacks: Callbacks = field(default_factory=Callbacks)
    # Called when all steps are made, while every process still lives.
    at_end: Callable[[RunContext, WorkerGroup], None] = lambda job, crew: None
    left: dict[str, list[int]] = field(default_factory=dict)  # `Supervisor.remote_pids` of the previous attempt

    def with_epoch(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of metrics or evaluations with the passes over the data that its steps have made."""
        return {**row, "epoch": row["step"] * self.run_spec.plan.batch_size / self.num_rows}

    @property
    def token_folders(self) -> tuple[Path, ...]:
        """Return the folders of all tokens, held-out ones included."""
        return (*self.tokens, *(self.held_out.tokens if self.held_out else ()))


def check_inputs(
    run_spec: RunSpec, run_dir: Path, manifest: Manifest | None, startup: Startup
) -> tuple[tuple[Path, ...], HeldOutData | None]:
    """Check everything that can be wrong with files, before the run is written or started. Raises ConfigError.

    Returns the folders of the tokens of the data's sources, and the held-out data.
    """
    config = run_spec.config
    check_packages(config)
    with startup.phase("looking for weights and tokenizer"):
        run_spec.source.check_weights(run_spec.structure)
        if manifest is None:
            run_spec.source.check_adapter(run_spec.structure)
        tokenizer_files(config.tokenizer)  # from the hub now, if at all: records of ids do not need it
    vocab_size = run_spec.structure.vocab_size
    startup.tell("reading data")
    tokens = tokenize(config.data, config.tokenizer, vocab_size, run_dir)
    stream = open_stream(config.data, tokens, vocab_size, batch_size=1)
    held_out = _held_out(run_spec, run_dir)
    if stream.joins_documents or (held_out and held_out.open().joins_documents):
        check_packing(run_spec.source.factory, run_spec.structure)
    if manifest is not None:
        stream.seek(manifest.data)
    return tokens, held_out


def _held_out(run_spec: RunSpec, run_dir: Path) -> HeldOutData | None:
    config, plan, vocab_size = run_spec.config, run_spec.plan, run_spec.structure.vocab_size
    data = config.data.held_out
    if data is None:
        return None
    if not config.evaluates:
        say("there are held-out data, and eval_every is 0: nothing is evaluated")
        return None
    with naming_held_out(data):
        tokens = tokenize(data, config.tokenizer, vocab_size, run_dir)
    return HeldOutData(data, tokens, vocab_size, plan.batch_size, plan.step.micro_batch_size * plan.hosts.num_gpus)
