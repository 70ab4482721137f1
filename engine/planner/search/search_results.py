"""Collects the plans that a search tried, and chooses one of them. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import Candidate
from megatrain_ray.engine.planner.search.lower_bounds import Bounds

if TYPE_CHECKING:
    from megatrain_ray.engine.planner.search.split_search import SplitSearch

TIE = 0.002  # of two plans whose times differ by a smaller share the simpler one is chosen
# Variants are tried of at most NUM_VARIED plans, and only of plans that take less than NEAR times as long as the best.
NUM_VARIED = 3
NEAR = 1.3


class Found(NamedTuple):
    """Holds a plan with a prediction, and the candidate and the search that it comes from."""

    step_s: float
    plan: Plan
    candidate: Candidate
    search: SplitSearch


class SearchResults:
    """Collects plans with a prediction, in the order in which they were tried: the simpler ones first."""

    def __init__(self) -> None:
        self.plans: list[Found] = []
        self.best_s = math.inf

    def add(self, found: Found) -> None:
        self.plans.append(found)
        self.best_s = min(self.best_s, found.step_s)

    def may_be_beaten_in(self, least_s: float) -> bool:
        """Return whether a plan that takes at least `least_s` may be chosen instead of the best one so far.

        A plan that is only a little faster than a simpler one is not chosen.
        """
        return least_s * (1 + TIE) < self.best_s

    def may_be_chosen(self, bounds: Bounds) -> bool:
        """Return whether a plan with these lower bounds may be chosen.

        A plan that takes as long as a simpler one changes nothing.
        """
        works_s = max(bounds.compute_s + bounds.late_s, bounds.update_s)
        return self.may_be_beaten_in(works_s) and max(bounds.chained_s, bounds.h2d_s, bounds.disk_s) < self.best_s

    def chosen(self) -> Plan:
        """Return the simplest plan that no other plan beats by more than TIE."""
        return next(found.plan for found in self.plans if found.step_s <= self.best_s * (1 + TIE))

    def best(self, *, uses_disk: bool) -> list[Found]:
        """Return the best plans that spill data of shards, or the best that do not. Their variants are tried."""
        near = [
            found for found in self.plans if found.plan.uses_disk is uses_disk and found.step_s < NEAR * self.best_s
        ]
        return sorted(near, key=lambda found: found.step_s)[:NUM_VARIED]
