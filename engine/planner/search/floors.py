"""Finds how many layers can live on the device at most, and what the host lacks then. Pure.

Both are the same for all splits into micro-batches, so they are computed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatrain_ray.engine.device.device import CONTEXT_BYTES
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.draft_plans import ALL_KEPT, NO_DISK, Drafts
from megatrain_ray.engine.planner.request import Candidate
from megatrain_ray.engine.planner.search.candidates import FEWEST_SLOTS
from megatrain_ray.engine.planner.search.fill_device import FILLED_SHARE, first_above


class Floor(NamedTuple):
    """Says how many layers can live on the device at most, for candidates of one kind.

    missing: bytes of host memory that are missing then (`Drafts.least_missing_ram`).
    """

    num_layers: int
    missing: int


@dataclass(frozen=True)
class Floors:
    """Caches the Floor of each kind of candidates, for one model, machine and request.

    Candidates of a kind differ only in slots and in what is kept for a backward.
    """

    known: dict[Hashable, Floor] = field(default_factory=dict)

    def of(self, drafts: Drafts, kind: Candidate, able: tuple[int, ...], entering_bytes: int) -> Floor:
        """Return the Floor of a kind of candidates.

        able: layers that may live on the device, in the order in which they do.
        entering_bytes: bytes of layer inputs that wait on the device.
        """
        request = drafts.request
        kind = replace(kind, **ALL_KEPT, **NO_DISK, num_block_slots=FEWEST_SLOTS[0], num_edge_slots=FEWEST_SLOTS[1])
        # With micro-batches outermost only one micro-batch has inputs there, and the smallest ones leave the most room.
        of_all = kind.order is LoopOrder.LAYERS_OUTER or request.num_micro_batches == 1
        besides = CONTEXT_BYTES + (entering_bytes if of_all else 0)
        on_host = request.micro_batch_size if kind.boundaries is Tier.HOST else 0
        key = kind, able, besides, on_host, request.num_micro_batches > 1, request.captured
        if key not in self.known:
            count = _most_layers(drafts, kind, able, besides)
            self.known[key] = Floor(count, drafts.least_missing_ram(replace(kind, hbm_layers=frozenset(able[:count]))))
        return self.known[key]


def _most_layers(drafts: Drafts, kind: Candidate, able: tuple[int, ...], besides: int) -> int:
    """Return the most layers that can live on the device beside `besides` bytes of context and layer inputs.

    Gradients may take the place of these bytes.
    """
    limit = drafts.machine.hbm_bytes
    if limit is None:
        return len(able)
    room = int(FILLED_SHARE * limit)

    def beyond(count: int) -> int:
        candidate = replace(kind, hbm_layers=frozenset(able[:count]))
        return drafts.placed_bytes(candidate) + max(besides, drafts.waiting_bytes(candidate)) - room

    return max(0, first_above(beyond, len(able) + 1) - 1)
