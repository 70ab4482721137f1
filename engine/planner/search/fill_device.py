"""Fills device memory that a plan need not use: with layers that live there, and with activations that are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatrain_ray.engine.discovery.compile_trial import ACTIVATION_BUDGETS
from megatrain_ray.engine.layout.tier import ELSEWHERE, Tier
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder
from megatrain_ray.engine.planner.memory.spill_choice import ORDERS
from megatrain_ray.engine.planner.request import Candidate

# Share of device memory that may be filled with what need not be there, because the bytes of a plan are an estimate.
# Three plans of 140 to 143 GB on an H200 took 134 to 142 GB by NVML.
FILLED_SHARE = 0.97
SHARES_ON_DISK = (1.0, 0.75, 0.5, 0.25)  # shares that are tried, of the blocks that could keep more on disk
NUM_BETWEEN = 2  # numbers of layers on the device that are tried between the fewest and the most


@dataclass(frozen=True)
class Filling:
    """Fills the device for one way to run a step, with more and more layers and activations.

    Layers live on the device from the first of the forward on, because the CPU updates the others during their forward.
    Memory that they leave goes to the last blocks, which keep more for their backward. What these keep is released
    first, and gradients take its place. If something is on disk, gradients of other layers also take that place, until
    their update.

    If the candidate offloads kept activations to the host, several numbers of blocks that do are tried, up to what the
    host has room for. The last blocks keep theirs on the device, because it would be reloaded at once.

    residency_order: layers that may live on the device, in the order in which they do.
    count_fewest: computes how many of them must (`fewest_layers`).
    fixed: whether no more than these may.
    """

    builder: PlanBuilder
    candidate: Candidate
    residency_order: tuple[int, ...]
    count_fewest: Callable[[Candidate, tuple[int, ...]], int]
    fixed: bool

    @property
    def most_kept(self) -> Candidate:
        """Return a candidate that computes and copies no more than any that the filling makes.

        No layer's state is on the device, and every block keeps more there.
        """
        return self._candidate(0, self.builder.num_blocks if self._offloads else self._most_tail_blocks)

    def smallest(self) -> Iterator[Candidate]:
        """Yield the candidates that may take the least memory: with everything offloaded that may be, and with nothing.

        They have as little on the device as the host allows. If the host has too little memory in any case, they have
        as many layers on the device as there is room for, using all of the limit.
        """
        fewest = self._fewest
        count = fewest if self.fixed else min(fewest, max(0, self._most_within(1.0)))
        nothing = self._candidate(count)
        yield nothing._replace(tail_budget=1.0, kept=Tier.HBM)  # the same for all candidates that differ in these
        if self._offloads:
            yield self._candidate(count, num_offloading=self.builder.num_blocks)

    def candidates(
        self, may_be_chosen: Callable[[Candidate], bool], may_spill: Callable[[int], bool],
        leaving_forwards: Callable[[Candidate], float],
    ) -> Iterator[Candidate]:  # fmt: skip
        """Yield the candidates that fit, the one with the most layers on the device first.

        may_be_chosen: returns false for a candidate that takes too long.
        may_spill: returns false for a number of bytes on disk that take too long.
        leaving_forwards: returns the number of forwards of a block during which one block's activations leave.
        """
        if not self._offloads and not self._fits(self._candidate(self._fewest)):
            return
        most = self._fewest if self.fixed else max(self._fewest, self._most_within(FILLED_SHARE))
        step = max(1, (most - self._fewest) // (NUM_BETWEEN + 1))
        leaving = leaving_forwards(self.candidate) if self._offloads else 0.0
        for count in dict.fromkeys((*range(most, self._fewest, -step), self._fewest)):
            if self._offloads:
                yield from filter(self._fits, self._offloading(count, may_be_chosen, leaving))
                continue
            # No plan with so many layers there is faster than one in which every block keeps more and every gradient
            # waits there. One with fewer layers may be: with more small ones on the host, no large one need be on disk.
            # But the host lacks no fewer bytes then, apart from the slab, and the disk has at least those.
            fastest = self._candidate(count, self._most_tail_blocks, self._most_waiting)
            slab_bytes = self.builder.in_memory(fastest).gradients.slab_bytes
            if not may_spill(self.builder.missing_ram(fastest) - slab_bytes):
                return
            if not may_be_chosen(fastest):
                continue
            num_tail_blocks = self._num_tail_blocks(count)
            if may_be_chosen(self._candidate(count, num_tail_blocks, self._most_waiting)):
                yield self._with_waiting(count, num_tail_blocks)

    @cached_property
    def _fewest(self) -> int:
        return self.count_fewest(self.candidate, self.residency_order)

    def _fits(self, candidate: Candidate) -> bool:
        return self._beyond(1.0, candidate) <= 0 and self.builder.host_room(candidate) > 0

    def _candidate(
        self, count: int, num_tail_blocks: int = 0, num_waiting: int = 0, num_offloading: int = 0
    ) -> Candidate:
        return self.candidate._replace(
            hbm_layers=frozenset(self.residency_order[:count]),
            num_tail_blocks=num_tail_blocks,
            tail_budget=self.candidate.tail_budget if self._offloads else self._larger_budget,
            num_waiting=num_waiting,
            num_offloading=num_offloading,
        )

    @cached_property
    def _larger_budget(self) -> float:
        """Return the activation budget of blocks that keep more.

        Blocks that are not compiled keep all or nothing. The parts of divided blocks are all treated alike.
        """
        if not self.builder.request.compiled and not self.builder.structure.is_divided:
            return 1.0
        return min((b for b in ACTIVATION_BUDGETS if b > self.candidate.activation_budget), default=1.0)

    @property
    def _offloads(self) -> bool:
        return self.candidate.kept is Tier.HOST

    @property
    def _most_tail_blocks(self) -> int:
        return self.builder.num_blocks if self._may_keep_more else 0

    @property
    def _may_keep_more(self) -> bool:
        is_limited = self.builder.machine.hbm_bytes is not None
        return is_limited and self.candidate.activation_budget < max(ACTIVATION_BUDGETS)

    def _most_within(self, share: float) -> int:
        """Return the most layers on the device with which a plan takes no more than this share of its memory.

        -1: it takes more even with none.
        """
        number = self.builder.num_blocks if self._offloads else 0
        end = len(self.residency_order) + 1
        return first_above(lambda count: self._beyond(share, self._candidate(count, num_offloading=number)), end) - 1

    @property
    def _most_waiting(self) -> int:
        """Return the number of gradients that may wait on the device: none without a disk (`_with_waiting`)."""
        machine = self.builder.machine
        return len(self.builder.layout.updated) if machine.spill and machine.hbm_bytes is not None else 0

    def _num_tail_blocks(self, count: int) -> int:
        """Return how many blocks may keep more, with `count` layers on the device."""
        if not self._may_keep_more:
            return 0
        end = self.builder.num_blocks + 1
        return max(0, first_above(lambda tail: self._beyond(FILLED_SHARE, self._candidate(count, tail)), end) - 1)

    def _with_waiting(self, count: int, num_tail_blocks: int) -> Candidate:
        """Return the candidate with as many gradients waiting on the device as it has room for, if shards spill.

        Gradients that wait on the device are not on disk.
        """
        without = self._candidate(count, num_tail_blocks)
        if self.builder.machine.hbm_bytes is None or not self.builder.spilled(without).of_shards:
            return without
        num_others = len(self.builder.layout.updated) - len(without.hbm_layers & set(self.builder.layout.updated))

        def beyond(num_waiting: int) -> int:
            return self._beyond(FILLED_SHARE, self._candidate(count, num_tail_blocks, num_waiting))

        return self._candidate(count, num_tail_blocks, max(0, first_above(beyond, num_others + 1) - 1))

    def _offloading(
        self, count: int, may_be_chosen: Callable[[Candidate], bool], leaving_forwards: float
    ) -> Iterator[Candidate]:
        """Yield candidates that offload kept activations.

        As many blocks offload as the link has time for: each under the forwards of a whole number of blocks, or all
        together under the whole forward. Then as many as there is room for. With these on disk, whose time they take,
        candidates that offload fewer follow. There are none if nothing can be offloaded, or if everything stays on the
        device.
        """
        blocks = self.builder.num_blocks
        together = self._with_staying(count, int(blocks / max(1.0, leaving_forwards)))
        if not may_be_chosen(together):
            return
        free = blocks - together.num_tail_blocks
        numbers = (int(free / max(1.0, f)) for f in (leaving_forwards, math.ceil(min(blocks + 1, leaving_forwards))))
        most = self._most_with_room(count, blocks)
        shares = SHARES_ON_DISK if self.candidate.spills_activations else (1.0,)
        for number in dict.fromkeys((*(min(n, most) for n in numbers), *(round(share * most) for share in shares))):
            candidate = self._with_staying(count, number)
            if any(layer.kept in ELSEWHERE for layer in self.builder.in_memory(candidate).layers):
                yield candidate

    def _most_with_room(self, count: int, most: int) -> int:
        """Return the number of blocks, up to `most`, that can offload what they keep because the host has room."""

        def beyond(number: int) -> int:
            return 1 - self.builder.likely_room(self._candidate(count, num_offloading=number))

        return most if beyond(most) <= 0 else max(0, first_above(beyond, most) - 1)

    def _with_staying(self, count: int, num_offloading: int) -> Candidate:
        """Return the candidate with as many last blocks as there is room for that keep more on the device."""
        blocks = self.builder.num_blocks

        def candidate(staying: int) -> Candidate:
            return self._candidate(count, staying, num_offloading=min(num_offloading, blocks - staying))

        def beyond(staying: int) -> int:
            return self._beyond(FILLED_SHARE, candidate(staying))

        return candidate(max(0, first_above(beyond, blocks) - 1))

    def _beyond(self, share: float, candidate: Candidate) -> int:
        """Return the bytes beyond this share of the device's memory; negative or 0 if it fits."""
        limit = self.builder.machine.hbm_bytes
        return 0 if limit is None else self.builder.device_bytes(candidate) - int(share * limit)


def fewest_layers(builder: PlanBuilder, candidate: Candidate, residency_order: tuple[int, ...]) -> int:
    """Return how many layers must live on the device so that host and disk have room for the others.

    It is the number of all layers if they never have room. What is kept for a backward makes no difference.
    """

    def room(count: int) -> int:
        return builder.likely_room(candidate._replace(hbm_layers=frozenset(residency_order[:count])))

    return first_above(room, len(residency_order))


def first_above(rising: Callable[[int], int], end: int) -> int:
    """Return the first number from 0 on at which a function that never falls is above 0; `end` if there is none before.

    Bytes of plans rise nearly in a straight line. So the point where the line through both ends crosses zero is tried
    before the middle.
    """
    if end == 0 or (at_low := rising(0)) > 0:
        return 0
    low, high = 0, end - 1
    if high == 0 or (at_high := rising(high)) <= 0:
        return end
    halves = False
    while high - low > 1:  # invariant: rising(low) <= 0 < rising(high)
        middle = (low + high) // 2 if halves else low + (high - low) * -at_low // (at_high - at_low)
        middle, halves = min(max(middle, low + 1), high - 1), not halves
        if (at_middle := rising(middle)) > 0:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    return high


def disk_variants(builder: PlanBuilder, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the disk_variants of a candidate that fit.

    If working copies are on disk, slots take the device memory that is left: what is uploaded less often is read less
    often.
    """
    disk_choices = [candidate, *_with_other_on_disk(builder, candidate)]
    yield from disk_choices[1:]
    for other in disk_choices:
        if builder.spilled(other).weights:
            slots = _most_slots(builder, other)
            if slots > other.num_block_slots:
                yield other._replace(num_block_slots=slots)


def _with_other_on_disk(builder: PlanBuilder, candidate: Candidate) -> Iterator[Candidate]:
    seen = {builder.spilled(candidate)}
    for first in ORDERS:
        other = candidate._replace(spill_first=first)
        on_disk = builder.spilled(other)
        if on_disk not in seen and builder.host_room(other) > 0:
            seen.add(on_disk)
            yield other


def _most_slots(builder: PlanBuilder, candidate: Candidate) -> int:
    """Return the most slots for blocks that the device has room for, at most one for each block."""
    limit = builder.machine.hbm_bytes
    if limit is None:
        return candidate.num_block_slots
    room, fewest = int(FILLED_SHARE * limit), candidate.num_block_slots

    def beyond(more: int) -> int:
        return builder.device_bytes(candidate._replace(num_block_slots=fewest + more)) - room

    return fewest + max(0, first_above(beyond, builder.num_blocks - fewest + 1) - 1)
