"""Mixes weighted sources: draws windows from several sources in turn, each in its own order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch_stream import Batch, BatchStream, assemble
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.io.batching.windows import Rows, Windows


class MixedStream:
    """Draws windows of several sources in proportion to their weights. The state is (epoch, cursor) of each source."""

    def __init__(
        self, sources: Sequence[Windows], weights: Sequence[float], *, batch_size: int, shuffle: bool, seed: int
    ) -> None:
        self._weights = integer_weights(weights)
        self._batch_size = batch_size
        self._streams = [
            BatchStream(windows, batch_size=batch_size, shuffle=shuffle, seed=splitmix64_chain(seed, index))
            for index, windows in enumerate(sources)
        ]

    @property
    def joins_documents(self) -> bool:
        return any(stream.joins_documents for stream in self._streams)

    @property
    def position(self) -> dict[str, Any]:
        return {"sources": [stream.position for stream in self._streams]}

    def seek(self, position: Mapping[str, Any]) -> None:
        saved = position.get("sources", [])
        if len(saved) != len(self._streams):
            raise ConfigError(
                f"the saved data position is of {len(saved)} weighted sources, data.path has {len(self._streams)}; "
                "restore the files the run was started with, or start a new run_dir"
            )
        for stream, there in zip(self._streams, saved, strict=True):
            stream.seek(there)

    def next_batch(self) -> Batch:
        turns = self._turns(self._batch_size)
        rows = [
            stream.draw(turns.count(index)) if index in turns else None for index, stream in enumerate(self._streams)
        ]
        return assemble(_in_turn(turns, rows))

    def skip(self, num_batches: int) -> None:
        # Each source has its exact share whenever as many windows were drawn as the weights add up to.
        whole, rest = divmod(num_batches * self._batch_size, sum(self._weights))
        turns = self._turns(rest)
        for index, (stream, weight) in enumerate(zip(self._streams, self._weights, strict=True)):
            stream.skip_windows(whole * weight + turns.count(index))

    def _turns(self, count: int) -> list[int]:
        """Return the index of the source of each of the next `count` windows."""
        drawn = [stream.num_drawn for stream in self._streams]
        turns = []
        for _ in range(count):
            turn = next_source(self._weights, drawn)
            drawn[turn] += 1
            turns.append(turn)
        return turns


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of the weights, taken as the decimal numbers that repr writes."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def next_source(weights: Sequence[int], drawn: Sequence[int]) -> int:
    """Return the index of the source of the next window.

    weights: integer weight of each source.
    drawn: number of windows drawn from each source so far.

    No source is ever a whole window off its share. Tijdeman, The chairman assignment problem (Discrete Mathematics 32,
    1980): of the sources that are at least 1/(2k-2) of a window behind, take the one that would first be too far
    behind; ties by index. With k sources each stays within 1 - 1/(2k-2).

    Taking the source that is furthest behind would be simpler, but does not stay within one window: with weights 100,
    3, 3, 10, 1, 3, 3, 933, 1, 1, 100, 3 one source falls 1.3 behind.
    """
    total, parts = sum(weights), max(2 * len(weights) - 2, 1)
    turn = sum(drawn) + 1
    behind = [parts * (weight * turn - total * count) for weight, count in zip(weights, drawn, strict=True)]
    ready = [index for index, deficit in enumerate(behind) if deficit >= total or len(weights) == 1]
    return min(ready, key=lambda index: (Fraction(total * (parts - 1) - behind[index], weights[index]), index))


def _in_turn(turns: Sequence[int], rows: Sequence[Rows | None]) -> Rows:
    order = np.argsort(np.argsort(turns, kind="stable"), kind="stable")
    return Rows(*(np.concatenate(parts)[order] for parts in zip(*filter(None, rows), strict=True)))
