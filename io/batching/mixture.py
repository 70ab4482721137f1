"""Mixes weighted sources: draws windows from several sources in turn, each in its own order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch, assemble
from megatrain_ray.io.batching.portion_stream import Portions, stream_of
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.io.batching.windows import Rows, Windows

REDRAWN = 64  # turns that `drawn_after` goes back at first


class MixedStream:
    """Draws windows of several sources in proportion to their weights, as BatchStream does of one source."""

    def __init__(
        self, sources: Sequence[Windows | Portions], weights: Sequence[float], *, batch_size: int, shuffle: bool,
        seed: int,
    ) -> None:  # fmt: skip
        self._weights = integer_weights(weights)
        self._batch_size = batch_size
        self.streams = [
            stream_of(source, batch_size=batch_size, shuffle=shuffle, seed=splitmix64_chain(seed, index))
            for index, source in enumerate(sources)
        ]

    @property
    def joins_documents(self) -> bool:
        return any(stream.joins_documents for stream in self.streams)

    @property
    def weighted(self) -> bool:
        return any(stream.weighted for stream in self.streams)

    @property
    def position(self) -> dict[str, Any]:
        return {"sources": [stream.position for stream in self.streams]}

    def seek(self, position: Mapping[str, Any]) -> None:
        saved = position.get("sources", [])
        if len(saved) != len(self.streams):
            raise ConfigError(
                f"the saved data position is of {len(saved)} weighted sources, data.path has {len(self.streams)}; "
                "restore the files the run was started with, or start a new run_dir"
            )
        for stream, there in zip(self.streams, saved, strict=True):
            stream.seek(there)

    def next_batch(self) -> Batch:
        drawn = self._drawn()
        turns = [draw_next(self._weights, drawn) for _ in range(self._batch_size)]
        rows = [stream.draw(turns.count(index)) for index, stream in enumerate(self.streams) if index in turns]
        order = np.argsort(np.argsort(turns, kind="stable"), kind="stable")
        whole = Rows(*(np.concatenate(parts)[order] for parts in zip(*rows, strict=True)))
        first = self.streams[0]  # in what follows all sources are alike
        return assemble(whole, first.kind._replace(weighted=self.weighted))

    def steps_ready(self, most: int) -> int:
        """Return how many batches, up to `most`, can be drawn from what is on disk of all sources."""
        drawn, ready = self._drawn(), [stream.num_drawn + stream.num_ready for stream in self.streams]
        for turn in range(most * self._batch_size):
            if drawn[index := draw_next(self._weights, drawn)] > ready[index]:
                return turn // self._batch_size
        return most

    def skip(self, num_batches: int) -> None:
        drawn = self._drawn()
        counts = drawn_after(self._weights, sum(drawn) + num_batches * self._batch_size)
        for stream, before, after in zip(self.streams, drawn, counts, strict=True):
            stream.skip_windows(after - before)

    def _drawn(self) -> list[int]:
        return [stream.num_drawn for stream in self.streams]


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of the weights, taken as the decimal numbers that repr writes."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def draw_next(weights: Sequence[int], drawn: list[int]) -> int:
    """Return the index of the source of the next window, and count the window in `drawn`.

    weights: integer weight of each source.
    drawn: number of windows drawn from each source so far.

    No source is ever a whole window off its share. Tijdeman, The chairman assignment problem (Discrete Mathematics 32,
    1980): of the sources that are at least 1/(2k-2) of a window behind, take the one that would first be too far
    behind; ties by index. With k sources each stays within 1 - 1/(2k-2).

    Taking the source that is furthest behind would be simpler, but does not stay within one window: with weights 100,
    3, 3, 10, 1, 3, 3, 933, 1, 1, 100, 3 one source falls 1.3 behind.
    """
    total, parts = sum(weights), _parts(weights)
    turn = sum(drawn) + 1
    behind = [parts * (weight * turn - total * count) for weight, count in zip(weights, drawn, strict=True)]
    ready = [index for index, deficit in enumerate(behind) if deficit >= total or len(weights) == 1]
    chosen = min(ready, key=lambda index: _deadline(weights, index, drawn[index]))
    drawn[chosen] += 1
    return chosen


def drawn_after(weights: Sequence[int], num_windows: int) -> list[int]:
    """Return how many of the first `num_windows` windows are of each source, without drawing all of them.

    The order is that of earliest deadlines first. If two queues have equally many windows and one has the more urgent
    ones at each position, that stays so at every turn. So this goes back some turns, where the true queue is unknown,
    and draws from there twice: with the most and with the least urgent queue that is possible. Where both meet, the
    true one is the same. In 94 % of 400 random mixtures of up to 12 sources they met within 64 turns.
    """
    num_redrawn = REDRAWN
    while True:
        start = max(0, num_windows - num_redrawn)
        counts = _extreme_counts(weights, start)
        for drawn in counts:
            for _ in range(num_windows - start):
                draw_next(weights, drawn)
        if counts[0] == counts[1]:  # always so from the first window on
            return counts[0]
        num_redrawn *= 4


def _extreme_counts(weights: Sequence[int], turn: int) -> tuple[list[int], list[int]]:
    """Return the number of windows of each source after `turn` windows, if the most urgent ones or the least are left.

    A window is in the queue from when its source is 1/(2k-2) of a window behind. That gives the size of the queue.
    """
    total, parts = sum(weights), _parts(weights)
    queued = [(parts * weight * turn - total) // (parts * total) + 1 for weight in weights]
    begun = [index for index, count in enumerate(queued) if count]
    by_urgency = sorted(begun, key=lambda index: _deadline(weights, index, queued[index] - 1))
    num_left = sum(queued) - turn
    most, least = by_urgency[:num_left], by_urgency[len(begun) - num_left :]
    first, second = ([count - (index in left) for index, count in enumerate(queued)] for left in (most, least))
    return first, second


def _deadline(weights: Sequence[int], index: int, count: int) -> tuple[Fraction, int]:
    """Return by when window `count` of a source must be drawn (in turns, divided by a constant), and the source."""
    return Fraction(_parts(weights) * (count + 1) - 1, weights[index]), index


def _parts(weights: Sequence[int]) -> int:
    return max(2 * len(weights) - 2, 1)
