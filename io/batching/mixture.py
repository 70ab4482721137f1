"""Mixes weighted sources: draws windows from several sources in turn, each in its own order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch_stream import Batch, assemble
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.io.batching.window_order import WindowOrder
from megatrain_ray.io.batching.windows import Rows, Windows


class MixedStream:
    """Draws windows of several sources in proportion to their weights. The state is (epoch, cursor) of each source."""

    def __init__(
        self, sources: Sequence[Windows], weights: Sequence[float], *, batch_size: int, shuffle: bool, seed: int
    ) -> None:
        self._sources = sources
        self._weights = integer_weights(weights)
        self._batch_size = batch_size
        self._orders = [
            WindowOrder(windows, shuffle=shuffle, seed=splitmix64_chain(seed, index))
            for index, windows in enumerate(sources)
        ]

    @property
    def joins_documents(self) -> bool:
        return any(source.joins_documents for source in self._sources)

    @property
    def position(self) -> dict[str, Any]:
        return {"sources": [order.position for order in self._orders]}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for a position of other sources or outside of these."""
        saved = position.get("sources", [])
        if len(saved) != len(self._orders):
            raise ConfigError(
                f"the saved data position is of {len(saved)} weighted sources, data.path has {len(self._orders)}; "
                "restore the files the run was started with, or start a new run_dir"
            )
        for order, there in zip(self._orders, saved, strict=True):
            order.seek(there)

    def next_batch(self) -> Batch:
        turns = self._turns(self._batch_size)
        rows = [
            source.rows(order.draw(turns.count(index))) if index in turns else None
            for index, (source, order) in enumerate(zip(self._sources, self._orders, strict=True))
        ]
        return assemble(_in_turn(turns, rows))

    def skip(self, num_batches: int) -> None:
        # Each source has its exact share whenever as many windows were drawn as the weights add up to.
        whole, rest = divmod(num_batches * self._batch_size, sum(self._weights))
        turns = self._turns(rest)
        for index, (order, weight) in enumerate(zip(self._orders, self._weights, strict=True)):
            order.skip(whole * weight + turns.count(index))

    def _turns(self, count: int) -> list[int]:
        """Return the index of the source of each of the next `count` windows."""
        drawn = [order.num_drawn for order in self._orders]
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
    """Interleave the rows of all sources in the order of the turns."""
    given = [part for part in rows if part is not None]
    order = np.argsort(np.argsort(turns, kind="stable"), kind="stable")
    return Rows(
        np.concatenate([part.ids for part in given])[order],
        np.concatenate([part.documents for part in given])[order],
        np.concatenate([part.supervised for part in given])[order],
    )
