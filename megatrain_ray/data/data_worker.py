"""Draws the batches of a run from tokenised data and remembers the stream's position after each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_sources import (
    cut_for_pass,
    naming_held_out,
    numbered,
    open_windows,
    sources_of,
    weights_of,
)
from megatrain_ray.data.rollout_stream import RolloutFiles, RolloutStream, rows_of_answers
from megatrain_ray.errors import ConfigError, NotPreparedError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import BatchStream, HeldOut
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.batching.data_counts import DataCounts
from megatrain_ray.io.batching.mixture import MixedStream
from megatrain_ray.io.batching.portion_stream import Portions, PortionStream, stream_of
from megatrain_ray.io.batching.windows import Windows
from megatrain_ray.spans import RecordedSpans, Row, SpanLog

if TYPE_CHECKING:
    from megatrain_ray.data.portion_supply import PortionSupply
    from megatrain_ray.data.stream_folder import StreamSpec

LOOK_AHEAD = 8  # steps: more than a run has under way
REMEMBERED_STEPS = 1024  # positions kept: more than the steps that are made while a save is written


def open_stream(
    data: DataConfig, tokens: Sequence[Path], vocab_size: int, batch_size: int, logprobs: Sequence[Path] = (),
    portions: Sequence[Portions] = (),
) -> BatchStream | MixedStream | PortionStream:  # fmt: skip
    """Open the batches of data.path from the token folder of each source. Raises ConfigError if one is wrong.

    logprobs: as for open_windows.
    portions: of sources that are read as streams, in place of `tokens`.
    """
    sources: Sequence[Windows | Portions]
    sources = portions or open_windows(data, tokens, vocab_size, logprobs, whole=False)
    if weights := weights_of(data):
        return MixedStream(sources, weights, batch_size=batch_size, shuffle=data.shuffle, seed=data.seed)
    return stream_of(sources[0], batch_size=batch_size, shuffle=data.shuffle, seed=data.seed)


def portion_streams(stream: object) -> list[PortionStream]:
    """Return the streams of the sources that are read in portions, in the order of the sources."""
    parts = stream.streams if isinstance(stream, MixedStream) else [stream]
    return [part for part in parts if isinstance(part, PortionStream)]


def open_rollout_stream(
    data: DataConfig, prompts: Sequence[Path], vocab_size: int, batch_size: int, files: RolloutFiles,
    micro_batch_size: int,
) -> RolloutStream:  # fmt: skip
    """Open the batches of the rollouts of a run, which need not be there yet. Raises ConfigError as open_stream.

    prompts: token folders of data.path.
    batch_size: answers of a batch.
    micro_batch_size: as for rows_of_answers.
    """
    stream = open_stream(data, prompts, vocab_size, batch_size)
    assert isinstance(stream, BatchStream)  # prompts have no weights
    return RolloutStream(
        stream, files, lambda folder: open_corpus("rollouts", folder, vocab_size),
        lambda answers: rows_of_answers(answers, data, vocab_size, micro_batch_size), batch_size,
    )  # fmt: skip


def count_data(data: DataConfig, tokens: Sequence[Path], vocab_size: int) -> DataCounts:
    """Count what one epoch of all sources holds. Raises ConfigError as open_stream."""
    return DataCounts.of(tokens, open_windows(data, tokens, vocab_size, whole=False))


def check_prompts(data: DataConfig, tokens: Sequence[Path], vocab_size: int) -> None:
    """Raise ConfigError if all labelled answers of a source are to one prompt (preferences.with_mismatched)."""
    for name, folder in zip(sources_of(data), tokens, strict=True):
        corpus = open_corpus(name, folder, vocab_size)
        assert corpus.loss_weights is not None  # answers are chats
        start, size = corpus.document_lengths[:2]
        if (corpus.loss_weights[start : start + size] < 0).any():
            raise ConfigError(
                f"data.path: all answers of {name} are to one prompt, and kto compares them with answers to another "
                "one; give records of two prompts or more, or set train.objective: apo_zero_unpaired"
            )


@dataclass(frozen=True)
class HeldOutData:
    """Describes the held-out data before it is opened.

    data: the configuration, as DataConfig.held_out.
    tokens: one folder of tokens for each source.
    batch_size: rows of a batch.
    micro_batch_size: rows of a micro-batch over all GPUs together, since each GPU computes as many rows.
    logprobs: as for open_windows.
    starts: as for HeldOut.
    """

    data: DataConfig
    tokens: tuple[Path, ...]
    vocab_size: int
    batch_size: int
    micro_batch_size: int
    logprobs: tuple[Path, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weight of each source in the mean over sources; of a single source it is 1."""
        return tuple(weights_of(self.data)) or (1.0,)

    def open(self) -> HeldOut:
        return HeldOut(
            self.windows(), batch_size=self.batch_size, micro_batch_size=self.micro_batch_size, starts=self.starts
        )

    def windows(self) -> list[Windows]:
        """Open the windows of each source."""
        with naming_held_out(self.data):
            return open_windows(self.data, self.tokens, self.vocab_size, self.logprobs, whole=True)


@dataclass(frozen=True)
class PassData(HeldOutData):
    """Describes data of which a pass takes the log-probabilities: sources that are trained on, and held-out ones.

    data: a configuration that cuts all of them into windows.
    names: of the sources, in messages.
    mismatched: as for cut_for_pass.
    """

    names: tuple[str, ...] = ()
    mismatched: bool = True

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.tokens)

    def windows(self) -> list[Windows]:
        named = zip(self.names, self.tokens, strict=True)
        windows = [
            cut_for_pass(self.data, name, folder, self.vocab_size, mismatched=self.mismatched) for name, folder in named
        ]
        return numbered(windows, self.tokens)


class DataWorker:
    """Serves batches in the order of steps, and held-out batches by number. The data actor only forwards to it."""

    def __init__(
        self, data: DataConfig, tokens: Sequence[Path], vocab_size: int, batch_size: int, step: int,
        position: Mapping[str, Any] | None, held_out: HeldOutData | None = None, traced: range = range(0),
        num_readers: int = 1, logprobs: Sequence[Path] = (), rollouts: RolloutFiles | None = None,
        micro_batch_size: int = 1, streamed: StreamSpec | None = None,
    ) -> None:  # fmt: skip
        """Start from `position`, which is that after `step` updates; without a position, from the start.

        tokens, logprobs: as for open_stream.
        traced: steps whose spans are recorded.
        num_readers: number of GPU workers, each of which asks for every batch at its own time.
        rollouts: of a run that answers its prompts itself. `batch_size` is the number of answers then.
        micro_batch_size: as for rows_of_answers.
        streamed: of sources that are read as streams.
        """
        self._stream: BatchStream | MixedStream | PortionStream | RolloutStream
        self._supply: PortionSupply | None = None
        if rollouts:
            self._stream = open_rollout_stream(data, tokens, vocab_size, batch_size, rollouts, micro_batch_size)
        elif streamed:
            from megatrain_ray.data.portion_supply import PortionSupply  # reads tables, which others do without
            from megatrain_ray.data.stream_folder import StreamFolder

            folder = StreamFolder(streamed)
            self._stream = open_stream(data, (), vocab_size, batch_size, portions=folder.sources)
            self._supply = PortionSupply(folder, portion_streams(self._stream))
        else:
            self._stream = open_stream(data, tokens, vocab_size, batch_size, logprobs)
        self._held_out = held_out.open() if held_out else None
        if position is not None:
            self._stream.seek(position)
        self._step = step
        self._start = step, self._stream.position
        self._positions = {step: self._stream.position}  # by step: that after its batch
        self._traced = traced
        self._spans = SpanLog()
        self._newest: dict[int, Batch] = {}  # kept for several readers, which are about a step apart
        self._num_kept = 2 if num_readers > 1 else 0

    def pid(self) -> int:
        return os.getpid()

    def batch(self, step: int) -> Batch:
        """Return the batch of a step.

        Usually this is the next step. It is an earlier one if a GPU worker repeats a step, and a later one if GPU
        workers have already had batches from an earlier data process.

        Raises NotPreparedError if a portion of a stream must be made first.
        """
        if step in self._newest:
            return self._newest[step]
        self._go_to(step - 1)
        if not self._num_ready(1):
            raise NotPreparedError(f"the data of step {step} are not there yet")
        self._spans.on = step in self._traced or step - 1 in self._traced  # drawn during the step before
        with self._spans.span(Row.BATCHES, f"batch {step}"):
            batch = self._stream.next_batch()
        self._arrive(step)
        if self._num_kept:
            self._newest[step] = batch
            self._newest.pop(step - self._num_kept, None)
        return batch

    def prepared(self, submitted: int) -> int:
        """Return the last step whose batch can be drawn without waiting, or one before; for sources that are streamed.

        Raises what kept the next portion from being made, if the step after `submitted` needs that.
        """
        assert self._supply is not None  # else everything is there
        last = self._step + self._num_ready(LOOK_AHEAD)
        if last <= submitted and self._supply.failure:
            raise self._supply.failure
        return last

    def _num_ready(self, most: int) -> int:
        """Return how many steps, up to `most`, can be drawn now, and have the portions made that are missing."""
        if self._supply is None or isinstance(self._stream, BatchStream | RolloutStream):
            return most
        self._supply.poll()
        num_ready = self._stream.steps_ready(most)
        self._supply.request(retries=num_ready > 0)
        return num_ready

    def position_after(self, step: int) -> Mapping[str, Any]:
        """Return the position of the stream after the batch of a step, whether or not this process drew it.

        Raises ValueError for a step before the one that the process was started from.
        """
        if step not in self._positions:
            self._go_to(step)
        return self._positions[step]

    def _go_to(self, step: int) -> None:
        """Move the stream to the end of a step: forwards, or from the last position known before it."""
        if step < self._step:
            known = {number: there for number, there in (self._start, *self._positions.items()) if number <= step}
            if not known:
                raise ValueError(f"step {step + 1} asked for, and this process knows of steps after {self._start[0]}")
            self._step = max(known)
            self._stream.seek(known[self._step])
        if step > self._step:
            self._stream.skip(step - self._step)
            self._arrive(step)

    def _arrive(self, step: int) -> None:
        self._step = step
        self._positions[step] = self._stream.position
        self._positions.pop(step - REMEMBERED_STEPS, None)

    def held_out_batch(self, index: int) -> Batch:
        assert self._held_out is not None  # called only if there are held-out data
        with self._spans.span(Row.BATCHES, f"held-out batch {index}"):
            return self._held_out.batch(index)

    def close(self) -> None:
        """End the process that makes portions, if there is one. It would end with this process, too."""
        if self._supply is not None:
            self._supply.close()

    def spans(self) -> RecordedSpans:
        return self._spans.take()
