"""The order in which a step visits layers: the two loop orders, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum


class LoopOrder(Enum):
    """MICRO_BATCHES_OUTER: a whole forward and backward for each micro-batch; weights stream for each of them.
    LAYERS_OUTER: each layer works on all micro-batches while it is on the device; weights stream once a step."""

    MICRO_BATCHES_OUTER = "micro_batches_outer"
    LAYERS_OUTER = "layers_outer"


class Phase(Enum):
    FORWARD = "forward"
    HEAD = "head"  # the last layer: its forward and the loss, and in a step its backward
    BACKWARD = "backward"


@dataclass(frozen=True)
class Visit:
    """One stay of a layer on the device. `last`: its gradient, if it has one, is complete afterwards."""

    index: int
    phase: Phase
    layer: int
    micro_batches: tuple[int, ...]
    last: bool


def visits(num_layers: int, num_micro_batches: int, order: LoopOrder, lowest_trained: int = 0) -> tuple[Visit, ...]:
    """All visits of a step. Layer 0 is the embedding, `num_layers - 1` the head. Backward ends at `lowest_trained`."""
    everything = tuple(range(num_micro_batches))
    rounds = [everything] if order is LoopOrder.LAYERS_OUTER else [(j,) for j in everything]
    steps = (
        (phase, layer, micro_batches, micro_batches[-1] == num_micro_batches - 1 and phase is not Phase.FORWARD)
        for micro_batches in rounds
        for phase, layer in _sweep(num_layers, lowest_trained)
    )
    return tuple(Visit(i, *step) for i, step in enumerate(steps))


def forward_visits(num_layers: int, num_micro_batches: int, order: LoopOrder) -> tuple[Visit, ...]:
    """All visits of an evaluation: a step's without its backward."""
    forward = [visit for visit in visits(num_layers, num_micro_batches, order) if visit.phase is not Phase.BACKWARD]
    return tuple(replace(visit, index=i, last=False) for i, visit in enumerate(forward))


def _sweep(num_layers: int, lowest_trained: int) -> Iterator[tuple[Phase, int]]:
    head = num_layers - 1
    yield from ((Phase.FORWARD, layer) for layer in range(head))
    yield Phase.HEAD, head
    yield from ((Phase.BACKWARD, layer) for layer in reversed(range(lowest_trained, head)))
