"""Varies a good plan that spills something: with other data on disk, or with more slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatrain_ray.engine.planner.memory.draft_plans import Drafts
from megatrain_ray.engine.planner.memory.spill_choice import ORDERS
from megatrain_ray.engine.planner.request import Candidate
from megatrain_ray.engine.planner.search.fill_device import FILLED_SHARE, first_above


def variants(drafts: Drafts, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the variants of a candidate that fit.

    If working copies are on disk, slots take the device memory that is left: what is uploaded less often is read less
    often.
    """
    of_disk = [candidate, *_with_other_on_disk(drafts, candidate)]
    yield from of_disk[1:]
    for other in of_disk:
        if drafts.spilled(other).weights:
            slots = _most_slots(drafts, other)
            if slots > other.num_block_slots:
                yield replace(other, num_block_slots=slots)


def _with_other_on_disk(drafts: Drafts, candidate: Candidate) -> Iterator[Candidate]:
    seen = {drafts.spilled(candidate)}
    for first in ORDERS:
        other = replace(candidate, spill_first=first)
        on_disk = drafts.spilled(other)
        if on_disk not in seen and drafts.host_room(other) > 0:
            seen.add(on_disk)
            yield other


def _most_slots(drafts: Drafts, candidate: Candidate) -> int:
    """Return the most slots for blocks that the device has room for, at most one for each block."""
    limit = drafts.machine.hbm_bytes
    if limit is None:
        return candidate.num_block_slots
    room, fewest = int(FILLED_SHARE * limit), candidate.num_block_slots

    def beyond(more: int) -> int:
        return drafts.device_bytes(replace(candidate, num_block_slots=fewest + more)) - room

    return fewest + max(0, first_above(beyond, drafts.num_blocks - fewest + 1) - 1)
