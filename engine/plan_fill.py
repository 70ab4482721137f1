"""What a plan does with device memory that it need not use: layers that live there, and activations that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from megatrain_ray.engine.compile_trial import ACTIVATION_BUDGETS
from megatrain_ray.engine.plan import ELSEWHERE, Plan, Tier
from megatrain_ray.engine.plan_request import Candidate
from megatrain_ray.engine.plan_spill import beyond_disk
from megatrain_ray.engine.planner import fits, spare_ram

# Of the device's memory, for what need not be there: what a plan counts is an estimate. Three plans of 140 to 143 GB on
# an H200 took 134 to 142 GB by NVML.
FILLED_SHARE = 0.97
# Rows of it that may take less the more layers live there.
SHRINKING = ("slots", "gradient slots", "gradients in HBM")
SHARES_ON_DISK = (1.0, 0.75, 0.5, 0.25)  # of blocks that could keep more there, those that are tried
NUM_BETWEEN = 2  # counts of layers on the device that are tried between the fewest and the most


@dataclass(frozen=True)
class Filling:
    """One way to run a step, with more and more on the device.

    Layers live there from the first of the forward on: the CPU updates the others under their forward. Memory that they
    leave goes to the last blocks, which keep more for their backward: it comes first, and gradients take the place of
    what they kept. Where something is on disk gradients of other layers take it too, until their update.
    Where the candidate has what they keep wait on the host, as many keep more as that has room for, and only the last
    ones of them use the device's memory: what they keep would come straight back.
    `draft`: the plan of a candidate; `draft_on_device`: the same with rows of device memory alone.
    `able`: layers that may live there, in the order in which they do; `layer_bytes`: what each layer takes then;
    `fewest` of them must (`fewest_layers`), `fixed`: and no more.
    """

    draft: Callable[[Candidate], Plan]
    draft_on_device: Callable[[Candidate], Plan]
    candidate: Candidate
    able: Sequence[int]
    layer_bytes: Sequence[int]
    num_blocks: int
    fewest: int
    fixed: bool

    @property
    def most_kept(self) -> Candidate:
        """Nothing that the filling makes computes less, or copies less: no layer's state on the device, and every block
        keeps more there."""
        return self._candidate(0, self._most_late, num_staying=self._most_late)

    def smallest(self) -> Plan:
        """With as little on the device as the host allows, or with as much as it has room for, all of it used, where
        the host has too little in any case."""
        return self._plan(self.fewest if self.fixed else min(self.fewest, max(0, self._most_within(1.0))), 0)

    def plans(self, may_win: Callable[[Plan], bool]) -> Iterator[Plan]:
        """Those that fit and may win, the one with the most layers on the device first."""
        if not self._offloads and not fits(self._plan(self.fewest, 0)):
            return
        # With more on the device, and with more kept, nothing takes longer: what cannot win then need not be filled.
        at_most = self.fewest if self.fixed else max(self.fewest, self._at_most)
        if not may_win(self._most_kept_with(at_most)):
            return
        most = self.fewest if self.fixed else max(self.fewest, self._most_within(FILLED_SHARE))
        step = max(1, (most - self.fewest) // (NUM_BETWEEN + 1))
        for count in dict.fromkeys((*range(most, self.fewest, -step), self.fewest)):
            if not may_win(self._most_kept_with(count)):
                return
            plans = self._offloading(count) if self._offloads else (self._with_late(count),)
            yield from filter(may_win, plans)

    def _most_kept_with(self, count: int) -> Plan:
        """All blocks keep more, and all of it stays."""
        return self._plan(count, self._most_late, num_staying=self._most_late if self._offloads else 0)

    def _plan(self, count: int, num_late: int, num_waiting: int = 0, num_staying: int = 0) -> Plan:
        return self.draft(self._candidate(count, num_late, num_waiting, num_staying))

    def _on_device(self, count: int, num_late: int, num_waiting: int = 0, num_staying: int = 0) -> Plan:
        return self.draft_on_device(self._candidate(count, num_late, num_waiting, num_staying))

    def _candidate(self, count: int, num_late: int, num_waiting: int = 0, num_staying: int = 0) -> Candidate:
        larger = min((b for b in ACTIVATION_BUDGETS if b > self.candidate.activation_budget), default=1.0)
        return replace(
            self.candidate,
            hbm_layers=frozenset(self.able[:count]),
            num_late=num_late,
            late_budget=self.candidate.late_budget if self._offloads else larger,
            num_waiting=num_waiting,
            num_staying=num_staying,
        )

    @property
    def _offloads(self) -> bool:
        return self.candidate.kept is Tier.HOST

    @property
    def _most_late(self) -> int:
        return self.num_blocks if self._offloads or self._may_keep_more else 0

    @property
    def _may_keep_more(self) -> bool:
        return self.candidate.activation_budget < max(ACTIVATION_BUDGETS)

    @property
    def _at_most(self) -> int:
        """No more layers fit on the device: however few slots there are, they and what is kept take at least this."""
        plan = self._on_device(0, 0)
        if plan.hbm_limit_bytes is None:
            return len(self.able)
        room = sum(row.num_bytes for row in plan.rows if row.name in SHRINKING) - _beyond(FILLED_SHARE, plan)
        ends = accumulate(self.layer_bytes[i] for i in self.able)
        return next((count for count, end in enumerate(ends) if end > room), len(self.able))

    def _most_within(self, share: float) -> int:
        """The most layers on the device with which a plan takes no more than this share of its memory; -1: even with
        none it takes more."""
        late = self._most_late if self._offloads else 0
        return first_above(lambda count: _beyond(share, self._on_device(count, late)), len(self.able) + 1) - 1

    def _with_late(self, count: int) -> Plan:
        without = self._plan(count, 0)
        if without.hbm_limit_bytes is None:
            return without
        most, beyond = 0, partial(_beyond, FILLED_SHARE)
        if self._may_keep_more:
            most = first_above(lambda late: beyond(self._on_device(count, late)), self.num_blocks + 1) - 1
        return self._with_waiting(count, max(0, most))

    def _with_waiting(self, count: int, num_late: int) -> Plan:
        """Gradients that wait on the device are on no disk."""
        without = self._plan(count, num_late)
        if not without.uses_disk:
            return without
        num_others = len(without.layer_order)
        beyond = partial(_beyond, FILLED_SHARE)
        most = first_above(lambda waiting: beyond(self._on_device(count, num_late, waiting)), num_others + 1) - 1
        return self._plan(count, num_late, most) if most > 0 else without

    def _offloading(self, count: int) -> Iterator[Plan]:
        """With as much kept elsewhere as has room there, and where that is on disk, whose time it takes, with less.
        None where nothing can be, or all on the device."""
        blocks = self.num_blocks

        def beyond_device(staying: int) -> int:
            return _beyond(FILLED_SHARE, self._on_device(count, blocks, num_staying=staying))

        def beyond_host(num_late: int) -> int:
            plan = self._plan(count, num_late, num_staying=staying)
            return max(-spare_ram(plan), beyond_disk(plan))

        staying = first_above(beyond_device, blocks) - 1
        most = first_above(beyond_host, blocks + 1) - 1
        shares = SHARES_ON_DISK if self.candidate.spills_activations else (1.0,)
        for num_late in dict.fromkeys(round(share * most) for share in shares):
            plan = self._plan(count, num_late, num_staying=staying)
            if any(layer.kept in ELSEWHERE for layer in plan.layers) and fits(plan):
                yield plan


def fewest_layers(draft: Callable[[Candidate], Plan], candidate: Candidate, able: Sequence[int]) -> int:
    """How many layers must live on the device for the host, and the disk, to have room for the others; all if they
    never have. What is kept for a backward makes no difference."""

    def room(count: int) -> int:
        plan = draft(replace(candidate, hbm_layers=frozenset(able[:count])))
        return -beyond_disk(plan) or spare_ram(plan) + 1

    return first_above(room, len(able))


def first_above(rising: Callable[[int], int], end: int) -> int:
    """The first number from 0 on of which a function that never falls is above 0, `end` if it is of none before.

    Bytes of plans rise nearly in a straight line, so where the line through the two ends of what is left crosses zero
    comes before the middle.
    """
    if end == 0 or (at_low := rising(0)) > 0:
        return 0
    low, high = 0, end - 1
    if high == 0 or (at_high := rising(high)) <= 0:
        return end
    halves = False
    while high - low > 1:  # not above 0 at `low`, above at `high`
        middle = (low + high) // 2 if halves else low + (high - low) * -at_low // (at_high - at_low)
        middle, halves = min(max(middle, low + 1), high - 1), not halves
        if (at_middle := rising(middle)) > 0:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    return high


def _beyond(share: float, plan: Plan) -> int:
    """Bytes beyond this share of the device's memory."""
    limit = plan.hbm_limit_bytes
    return 0 if limit is None else plan.total_bytes(Tier.HBM) - int(share * limit)
