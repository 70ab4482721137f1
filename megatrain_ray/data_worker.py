"""The process that draws batches from tokenised data, with the position after each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain_ray.config import DataConfig, WeightedPath
from megatrain_ray.io.batches import Batch, BatchStream, Stream
from megatrain_ray.io.corpus import open_corpus
from megatrain_ray.io.mixture import MixedStream
from megatrain_ray.io.windows import Windows, cut

REMEMBERED_STEPS = 64  # positions kept: more than steps can be ahead of a save


def sources_of(data: DataConfig) -> dict[str, str | tuple[str, ...]]:
    """What data.path holds for each source, by the name it has in messages; one source where there are no weights."""
    weighted = [source for source in data.path if isinstance(source, WeightedPath)]
    if weighted:
        return {f"data.path[{index}], {source.path}": source.path for index, source in enumerate(weighted)}
    plain = data.path if isinstance(data.path, str) else tuple(map(str, data.path))
    return {plain if isinstance(plain, str) else ", ".join(plain): plain}


def open_stream(data: DataConfig, tokens: Sequence[Path], vocab_size: int, batch_size: int) -> Stream:
    """Batches of data.path, from the folders of tokens of its sources. Raises ConfigError where these are wrong."""
    sources = _windows(data, tokens, vocab_size)
    weights = [source.weight for source in data.path if isinstance(source, WeightedPath)]
    if weights:
        return MixedStream(sources, weights, batch_size=batch_size, shuffle=data.shuffle, seed=data.seed)
    return BatchStream(sources[0], batch_size=batch_size, shuffle=data.shuffle, seed=data.seed)


def count_windows(data: DataConfig, tokens: Sequence[Path], vocab_size: int) -> int:
    """Sequences of an epoch of all sources. Raises ConfigError as open_stream."""
    return sum(source.num_windows for source in _windows(data, tokens, vocab_size))


def _windows(data: DataConfig, tokens: Sequence[Path], vocab_size: int) -> list[Windows]:
    return [
        cut(
            open_corpus(name, folder, vocab_size),
            seq_len=data.seq_len,
            packing=data.packing,
            vocab_size=vocab_size,
        )
        for name, folder in zip(sources_of(data), tokens, strict=True)
    ]


class DataWorker:
    """Plain class behind the data actor: batches in the order of steps."""

    def __init__(
        self, data: DataConfig, tokens: Sequence[Path], vocab_size: int, batch_size: int, step: int,
        position: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Continues after `step` updates at `position`; None: from the start. `tokens`: as for open_stream."""
        self._stream = open_stream(data, tokens, vocab_size, batch_size)
        if position is not None:
            self._stream.seek(position)
        self._step = step
        self._positions = {step: self._stream.position}

    def pid(self) -> int:
        return os.getpid()

    def batch(self, step: int) -> Batch:
        """The batch of a step; steps must be asked for in order."""
        if step != self._step + 1:
            raise ValueError(f"step {step} asked for, the next is {self._step + 1}")
        batch = self._stream.next_batch()
        self._step = step
        self._positions[step] = self._stream.position
        self._positions.pop(step - REMEMBERED_STEPS, None)
        return batch

    def position(self, step: int) -> dict[str, Any]:
        """Where the data stood after `step` updates; part of a save."""
        return self._positions[step]
