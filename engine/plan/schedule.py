"""Describes as data the order in which a step visits layers, for both loop orders."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import Enum


class LoopOrder(Enum):
    """Says which of a step's two loops, over layers and over micro-batches, is the outer one.

    MICRO_BATCHES_OUTER: each micro-batch has a whole forward and backward; weights stream once per micro-batch.
    LAYERS_OUTER: each layer processes all micro-batches while it is on the device; weights stream once per step.
    """

    MICRO_BATCHES_OUTER = "micro_batches_outer"
    LAYERS_OUTER = "layers_outer"

    __hash__ = object.__hash__  # Enum.__hash__ is Python code, and the plan search hashes members all the time


class Phase(Enum):
    """Says what a visit does with a layer."""

    FORWARD = "forward"
    HEAD = "head"  # the last layer: its forward and the loss, and in a training step also its backward
    REPLAY = "replay"  # the forward once more, to recompute the input of the next layer
    BACKWARD = "backward"


WITH_GRADIENT = (Phase.HEAD, Phase.BACKWARD)

# Tokens of a row that are sampled while weights stream without a pause. Those after the last end compute nothing.
FORWARDS_AT_ONCE = 8


@dataclass(frozen=True)
class Visit:
    """Describes one stay of a layer on the device, for one phase of some micro-batches.

    index: position of the visit in the step.
    last: the layer's gradient, if it has one, is complete after this visit.
    """

    index: int
    phase: Phase
    layer: int
    micro_batches: tuple[int, ...]
    last: bool


def visits(
    num_layers: int, num_micro_batches: int, order: LoopOrder, without_backward: Set[int] = frozenset(),
    replayed: Set[int] = frozenset(),
) -> tuple[Visit, ...]:  # fmt: skip
    """Return all visits of a step in order. Layer 0 is the embedding, `num_layers - 1` the head.

    without_backward: layers that no gradient reaches. None of them is in `replayed`.
    replayed: layers that run forward once more before the backward of the next layer, whose input is not kept.
    """
    everything = tuple(range(num_micro_batches))
    rounds = [everything] if order is LoopOrder.LAYERS_OUTER else [(j,) for j in everything]
    steps = (
        (phase, layer, micro_batches, micro_batches[-1] == num_micro_batches - 1 and phase in WITH_GRADIENT)
        for micro_batches in rounds
        for phase, layer in _sweep(num_layers, replayed)
        if phase is not Phase.BACKWARD or layer not in without_backward
    )
    return tuple(Visit(i, *step) for i, step in enumerate(steps))


def forward_visits(num_layers: int, num_micro_batches: int, order: LoopOrder) -> tuple[Visit, ...]:
    """Return all visits of an evaluation: those of a step without its backward."""
    forward = [visit for visit in visits(num_layers, num_micro_batches, order) if visit.phase is not Phase.BACKWARD]
    return tuple(replace(visit, index=i, last=False) for i, visit in enumerate(forward))


def _sweep(num_layers: int, replayed: Set[int]) -> Iterator[tuple[Phase, int]]:
    head = num_layers - 1
    yield from ((Phase.FORWARD, layer) for layer in range(head))
    yield Phase.HEAD, head
    last = head - 1
    while last >= 0:
        first = last  # becomes the first layer of the segment: the nearest one whose input was kept
        while first - 1 in replayed:
            first -= 1
        yield from ((Phase.REPLAY, layer) for layer in range(first, last))
        yield from ((Phase.BACKWARD, layer) for layer in reversed(range(first, last + 1)))
        last = first - 1
