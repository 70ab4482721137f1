"""The order in which a step visits layers: the two loop orders, as data."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import Enum


class LoopOrder(Enum):
    """MICRO_BATCHES_OUTER: a whole forward and backward for each micro-batch; weights stream for each of them.
    LAYERS_OUTER: each layer works on all micro-batches while it is on the device; weights stream once a step."""

    MICRO_BATCHES_OUTER = "micro_batches_outer"
    LAYERS_OUTER = "layers_outer"

    __hash__ = object.__hash__  # Enum's own is Python, and the search asks for it all the time


class Phase(Enum):
    FORWARD = "forward"
    HEAD = "head"  # the last layer: its forward and the loss, and in a step its backward
    REPLAY = "replay"  # the forward once more, for what enters the layer behind it
    BACKWARD = "backward"


WITH_GRADIENT = (Phase.HEAD, Phase.BACKWARD)


@dataclass(frozen=True)
class Visit:
    """One stay of a layer on the device. `last`: its gradient, if it has one, is complete afterwards."""

    index: int
    phase: Phase
    layer: int
    micro_batches: tuple[int, ...]
    last: bool


def visits(
    num_layers: int,
    num_micro_batches: int,
    order: LoopOrder,
    lowest_trained: int = 0,
    replayed: Set[int] = frozenset(),
) -> tuple[Visit, ...]:
    """All visits of a step. Layer 0 is the embedding, `num_layers - 1` the head. Backward ends at `lowest_trained`.
    `replayed`: layers that run forward once more before the backward of the layer behind, whose input is not kept."""
    everything = tuple(range(num_micro_batches))
    rounds = [everything] if order is LoopOrder.LAYERS_OUTER else [(j,) for j in everything]
    steps = (
        (phase, layer, micro_batches, micro_batches[-1] == num_micro_batches - 1 and phase in WITH_GRADIENT)
        for micro_batches in rounds
        for phase, layer in _sweep(num_layers, lowest_trained, replayed)
    )
    return tuple(Visit(i, *step) for i, step in enumerate(steps))


def forward_visits(num_layers: int, num_micro_batches: int, order: LoopOrder) -> tuple[Visit, ...]:
    """All visits of an evaluation: a step's without its backward."""
    forward = [visit for visit in visits(num_layers, num_micro_batches, order) if visit.phase is not Phase.BACKWARD]
    return tuple(replace(visit, index=i, last=False) for i, visit in enumerate(forward))


def _sweep(num_layers: int, lowest_trained: int, replayed: Set[int]) -> Iterator[tuple[Phase, int]]:
    head = num_layers - 1
    yield from ((Phase.FORWARD, layer) for layer in range(head))
    yield Phase.HEAD, head
    last = head - 1
    while last >= lowest_trained:
        first = last  # of a segment: what enters it was kept
        while first - 1 in replayed:
            first -= 1
        yield from ((Phase.REPLAY, layer) for layer in range(first, last))
        yield from ((Phase.BACKWARD, layer) for layer in reversed(range(first, last + 1)))
        last = first - 1
