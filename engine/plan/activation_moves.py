"""What of a layer's activations waits elsewhere than on the device, and when it comes back: for the engine, which moves
them, and for the simulation of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from megatrain_ray.engine.layout.tier import ELSEWHERE, Tier
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from megatrain_ray.engine.plan.schedule import Phase, Visit

RETURNING = (Phase.REPLAY, Phase.BACKWARD)


class Activations(Enum):
    """BOUNDARY: what enters a layer. KEPT: what its forward keeps for its backward beyond that and the weights."""

    BOUNDARY = "boundary"
    KEPT = "kept"

    __hash__ = object.__hash__  # Enum's own is Python, and simulations ask for it all the time


class Stop(NamedTuple):
    """A micro-batch in a visit of the backward sweep."""

    phase: Phase
    layer: int
    micro_batch: int


def away(layer: LayerPlan) -> tuple[Activations, ...]:
    """Of one micro-batch, what leaves the device behind the layer's forward, in this order."""
    boundary = (Activations.BOUNDARY,) if layer.boundary in ELSEWHERE else ()
    return (*boundary, Activations.KEPT) if layer.kept in ELSEWHERE else boundary


def is_on_disk(layer: LayerPlan, kind: Activations) -> bool:
    return (layer.boundary if kind is Activations.BOUNDARY else layer.kept) is Tier.NVME


def num_bytes(layer: LayerPlan, kind: Activations) -> int:
    """Of one micro-batch."""
    return layer.boundary_bytes if kind is Activations.BOUNDARY else layer.kept_bytes


def stops(visits: Sequence[Visit]) -> list[Stop]:
    """Of a step, in order: what is away comes back for one of them."""
    backward = (visit for visit in visits if visit.phase in RETURNING)
    return [Stop(visit.phase, visit.layer, j) for visit in backward for j in visit.micro_batches]


def needed(plan: Plan, phase: Phase, layer: int) -> tuple[tuple[Activations, int], ...]:
    """What comes back for such a visit, and of which layer. What enters a layer that runs forward once more is there
    from then on."""
    if phase not in RETURNING:
        return ()
    own = away(plan.layers[layer])
    boundary = [(kind, layer) for kind in own if kind is Activations.BOUNDARY]
    if phase is Phase.REPLAY:
        return tuple(boundary)
    kept = [(Activations.KEPT, i) for i in plan.kept_until[layer] if plan.layers[i].kept in ELSEWHERE]
    return tuple(kept if layer in plan.replayed_layers else boundary + kept)
