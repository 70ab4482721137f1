"""Says which activations of a layer are offloaded from the device, and when they are reloaded.

The engine, which moves them, and the simulation of it share this.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from megatrain_ray.engine.layout.tier import ELSEWHERE, Tier
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from megatrain_ray.engine.plan.schedule import Phase, Visit

RETURNING = (Phase.REPLAY, Phase.BACKWARD)


class Activations(Enum):
    """Kinds of activations of a layer.

    BOUNDARY: the layer's input.
    KEPT: what its forward keeps for its backward besides the input and the weights.
    """

    BOUNDARY = "boundary"
    KEPT = "kept"

    __hash__ = object.__hash__  # Enum.__hash__ is Python code, and simulations hash members all the time


class Stop(NamedTuple):
    """Names one micro-batch in one visit of the backward sweep."""

    phase: Phase
    layer: int
    micro_batch: int


def away(layer: LayerPlan) -> tuple[Activations, ...]:
    """Return the activations of a micro-batch that leave the device after the layer's forward, in this order."""
    boundary = (Activations.BOUNDARY,) if layer.boundary in ELSEWHERE else ()
    return (*boundary, Activations.KEPT) if layer.kept in ELSEWHERE else boundary


def is_on_disk(layer: LayerPlan, kind: Activations) -> bool:
    return (layer.boundary if kind is Activations.BOUNDARY else layer.kept) is Tier.NVME


def num_bytes(layer: LayerPlan, kind: Activations) -> int:
    """Return the bytes of a layer's activations of one kind, for one micro-batch."""
    return layer.boundary_bytes if kind is Activations.BOUNDARY else layer.kept_bytes


def stops(visits: Sequence[Visit]) -> list[Stop]:
    """Return the stops of a step in order. Each offloaded activation is reloaded for one of them."""
    backward = (visit for visit in visits if visit.phase in RETURNING)
    return [Stop(visit.phase, visit.layer, j) for visit in backward for j in visit.micro_batches]


def needed(plan: Plan, phase: Phase, layer: int) -> tuple[tuple[Activations, int], ...]:
    """Return the offloaded activations that are reloaded for a visit, each with the layer that they belong to.

    The input of a layer that is replayed is reloaded for the replay, and stays on the device until the backward.
    """
    if phase not in RETURNING:
        return ()
    own = away(plan.layers[layer])
    boundary = [(kind, layer) for kind in own if kind is Activations.BOUNDARY]
    if phase is Phase.REPLAY:
        return tuple(boundary)
    kept = [(Activations.KEPT, i) for i in plan.kept_until[layer] if plan.layers[i].kept in ELSEWHERE]
    return tuple(kept if layer in plan.replayed_layers else boundary + kept)
