"""What a plan does with device memory that it need not use: layers that live there, and activations that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatrain_ray.engine.compile_trial import ACTIVATION_BUDGETS
from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.engine.plan_request import Candidate
from megatrain_ray.engine.plan_spill import beyond_disk
from megatrain_ray.engine.planner import fits, spare_ram

# Of the device's memory, for what need not be there: what a plan counts is an estimate. Three plans of 140 to 143 GB on
# an H200 took 134 to 142 GB by NVML.
FILLED_SHARE = 0.97
NUM_BETWEEN = 2  # counts of layers on the device that are tried between the fewest and the most


@dataclass(frozen=True)
class Filling:
    """One way to run a step, with more and more on the device.

    Layers live there from the first of the forward on: the CPU updates the others under their forward. Memory that they
    leave goes to the last blocks, which keep more for their backward: it comes first, and gradients take the place of
    what they kept.
    `able`: layers that may live there; `fewest` of them must (`fewest_layers`), `fixed`: and no more.
    """

    draft: Callable[[Candidate], Plan]
    candidate: Candidate
    able: Sequence[int]
    num_blocks: int
    fewest: int
    fixed: bool

    @property
    def most_kept(self) -> Candidate:
        """Nothing that the filling makes computes less: no layer's state on the device, and every block keeps more."""
        return self._candidate(0, self._most_late)

    def smallest(self) -> Plan:
        """With as little on the device as the host allows, or with as much as it has room for, all of it used, where
        the host has too little in any case."""
        return self._plan(self.fewest if self.fixed else min(self.fewest, max(0, self._most_within(1.0))), 0)

    def plans(self, may_win: Callable[[Plan], bool]) -> Iterator[Plan]:
        """Those that fit and may win, the one with the most layers on the device first."""
        if not fits(self._plan(self.fewest, 0)):
            return
        most = self.fewest if self.fixed else max(self.fewest, self._most_within(FILLED_SHARE))
        step = max(1, (most - self.fewest) // (NUM_BETWEEN + 1))
        for count in dict.fromkeys((*range(most, self.fewest, -step), self.fewest)):
            # With more kept nothing takes longer, so what cannot win then need not be filled.
            if may_win(self._plan(count, self._most_late)) and may_win(plan := self._with_late(count)):
                yield plan

    def _plan(self, count: int, num_late: int) -> Plan:
        return self.draft(self._candidate(count, num_late))

    def _candidate(self, count: int, num_late: int) -> Candidate:
        larger = min((b for b in ACTIVATION_BUDGETS if b > self.candidate.activation_budget), default=1.0)
        layers = frozenset(self.able[:count])
        return replace(self.candidate, hbm_layers=layers, num_late=num_late, late_budget=larger)

    @property
    def _most_late(self) -> int:
        return self.num_blocks if self._may_keep_more else 0

    @property
    def _may_keep_more(self) -> bool:
        return self.candidate.activation_budget < max(ACTIVATION_BUDGETS)

    def _most_within(self, share: float) -> int:
        """The most layers on the device with which a plan takes no more than this share of its memory; -1: even with
        none it takes more."""
        return first_above(lambda count: _beyond(share, self._plan(count, 0)), len(self.able) + 1) - 1

    def _with_late(self, count: int) -> Plan:
        without = self._plan(count, 0)
        if without.hbm_limit_bytes is None or not self._may_keep_more:
            return without
        most = first_above(lambda late: _beyond(FILLED_SHARE, self._plan(count, late)), self.num_blocks + 1) - 1
        return self._plan(count, most) if most > 0 else without


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
