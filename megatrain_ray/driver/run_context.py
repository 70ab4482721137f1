"""Defines what the driver shares among all attempts at a run, and checks the files that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.interrupts import Interrupts
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import Startup
from megatrain_ray.crew.ray_daemons import Daemons
from megatrain_ray.crew.recovery import FailureBudget
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.data.data_sources import naming_held_out
from megatrain_ray.data.data_worker import HeldOutData, check_prompts, count_data, open_stream
from megatrain_ray.data.marks_and_template import ALL_IDS
from megatrain_ray.data.open_streams import open_streams
from megatrain_ray.data.stream_folder import StreamFolder, StreamSpec
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.driver.callbacks import Callbacks
from megatrain_ray.driver.running_evaluation import Keep
from megatrain_ray.io.batching.batch_stream import BatchStream
from megatrain_ray.io.batching.data_counts import DataCounts
from megatrain_ray.io.batching.mixture import MixedStream
from megatrain_ray.io.batching.portion_stream import PortionStream
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.tokens.token_files import is_weighted
from megatrain_ray.io.tokens.tokenizer import tokenizer_files
from megatrain_ray.metrics.sinks import check_packages
from megatrain_ray.model.sight_check import check_packing
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.rollouts.run_rollouts import RunRollouts
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.save_mirror import SaveMirror


@dataclass(frozen=True)
class RunContext:
    """Holds what the driver shares among all attempts at a run: an attempt ends when a process is lost."""

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
    at_end: Callable[[RunContext, WorkerGroup], None] = lambda context, crew: None
    # Folders of a reference's log-probabilities, as many as of tokens; none: no reference.
    logprobs: tuple[Path, ...] = ()
    rollouts: RunRollouts | None = None  # if the run answers its prompts itself
    mirror: SaveMirror | None = None  # of the saves
    keep: Keep = lambda batches, index, loss: None  # of every evaluation
    streamed: StreamSpec | None = None  # of data that are read as a stream
    left: dict[str, list[int]] = field(default_factory=dict)  # `Supervisor.remote_pids` of the previous attempt

    def with_epoch(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of metrics or evaluations with the passes over the data that its steps have made."""
        return {**row, "epoch": row["step"] * self.run_spec.plan.batch_size / self.num_rows}

    @property
    def token_folders(self) -> tuple[Path, ...]:
        """Return the folders of all tokens and log-probabilities, held-out ones included."""
        held_out = (*self.held_out.tokens, *self.held_out.logprobs) if self.held_out else ()
        features = self.run_spec.features
        return (*self.tokens, *self.logprobs, *held_out, *features.training, *features.held_out)


class DataTokens(NamedTuple):
    """Holds the folders of tokens of the data's sources, and what an epoch of these has.

    held_out: folders of the held-out data; None: nothing is evaluated.
    streamed: of data that are read as a stream; `training` are then the current portions, and `counts` are estimated.
    """

    counts: DataCounts
    training: tuple[Path, ...]
    held_out: tuple[Path, ...] | None
    streamed: StreamSpec | None = None

    @property
    def weighted(self) -> bool:
        """Return whether batches have loss weights."""
        if self.streamed:
            return any(source.weighted for source in StreamFolder(self.streamed).sources)
        return any(map(is_weighted, self.training))

    def open(self, config: TrainConfig, vocab_size: int) -> BatchStream | MixedStream | PortionStream:
        """Open the stream of single rows of training data. Raises ConfigError as open_stream."""
        portions = StreamFolder(replace(self.streamed, vocab_size=vocab_size)).sources if self.streamed else ()
        return open_stream(config.data, self.training, vocab_size, batch_size=1, portions=portions)


def read_data(
    config: TrainConfig, vocab_size: int | None, run_dir: Path, startup: Startup,
    position: Mapping[str, Any] | None = None,
) -> DataTokens:  # fmt: skip
    """Tokenize all data of a run and check what else it needs, before a process is started. Raises ConfigError.

    vocab_size: of the model; None: not known yet, so that ids are checked later.
    position: of the data in the save that the run goes on from; None: it begins. Of a stream it says which portions
        are made.
    """
    check_packages(config)
    startup.tell("reading data")
    tokenizer_files(config.tokenizer)  # from the hub now, if at all: records of ids do not need it
    limit = vocab_size or ALL_IDS
    needs_prompts = config.train.estimates_kl
    streamed = None
    if config.data.stream is None:
        training = tokenize(config.data, config.tokenizer, limit, run_dir)
    else:
        streamed, training, share = open_streams(config.data, config.tokenizer, limit, run_dir, position)
    if needs_prompts:
        check_prompts(config.data, training, limit)
    counts = count_data(config.data, training, limit)
    if streamed:
        counts = counts.estimated(share)
    if rollouts := config.train.rollouts:  # each answer is a row
        counts = replace(counts, num_rows=counts.num_rows * rollouts.group_size)
    held_out = config.data.held_out
    if held_out is None:
        return DataTokens(counts, training, None, streamed)
    if not config.evaluates:
        say("there are held-out data, and eval_every is 0: nothing is evaluated")
        return DataTokens(counts, training, None, streamed)
    with naming_held_out(held_out):
        evaluated = tokenize(held_out, config.tokenizer, limit, run_dir)
        if needs_prompts:
            check_prompts(held_out, evaluated, limit)
    return DataTokens(counts, training, evaluated, streamed)


def check_position(config: TrainConfig, tokens: DataTokens, vocab_size: int | None, manifest: Manifest | None) -> None:
    """Raise ConfigError, before a process is started, if a save was made with other data than these.

    vocab_size: of the model; None: not known yet, so that check_inputs does this.
    """
    if manifest is not None and vocab_size is not None:
        tokens.open(config, vocab_size).seek(manifest.data)


def check_inputs(
    run_spec: RunSpec, tokens: DataTokens, manifest: Manifest | None, startup: Startup
) -> HeldOutData | None:
    """Check what can be wrong with weights and tokens once the model is known. Return the held-out data.

    Raises ConfigError.
    """
    config, plan, vocab_size = run_spec.config, run_spec.plan, run_spec.structure.vocab_size
    with startup.phase("looking for weights"):
        run_spec.source.check_weights(run_spec.structure)
        if manifest is None:
            run_spec.source.check_adapter(run_spec.structure)
    check_position(config, tokens, vocab_size, manifest)
    stream = tokens.open(config, vocab_size)
    held_out = None
    if tokens.held_out is not None and config.data.held_out is not None and config.train.rollouts is None:
        micro_batch_size = plan.step.micro_batch_size * plan.hosts.num_gpus
        held_out = HeldOutData(config.data.held_out, tokens.held_out, vocab_size, plan.batch_size, micro_batch_size)
    packs_answers = config.train.rollouts is not None and config.data.packing
    if packs_answers or stream.joins_documents or (held_out and held_out.open().joins_documents):
        of_pairs = "data.kind: pairs: both answers of a preference share a row", "set data.packing: false"
        check_packing(run_spec.source.architecture, *(of_pairs if config.data.in_pairs else ()))
    return held_out
