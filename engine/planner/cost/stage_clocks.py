"""Holds what the parts of a simulated step share: a clock for each stage, and regions that are empty at some time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatrain_ray.engine.plan.residency import regions_of
from megatrain_ray.virtual_clock import CostModel, Op, Stage


class Clocks:
    """Tracks when each stage ends what was submitted to it, and counts the seconds and bytes of the current step."""

    def __init__(self, cost: CostModel) -> None:
        """Set all clocks to 0.

        cost: seconds of an operation, the same for every micro-batch.
        """
        self._cost = cost
        self.end_s = dict.fromkeys(Stage, 0.0)
        self.begin()

    def begin(self) -> None:
        """Begin a step: reset its counters. The clocks go on."""
        self.compute_s: dict[str, float] = defaultdict(float)
        self.exposed_s: dict[str, float] = defaultdict(float)
        self.busy_s: dict[Stage, float] = defaultdict(float)
        self.num_bytes: dict[Stage, int] = defaultdict(int)

    @property
    def computed_s(self) -> float:
        return self.end_s[Stage.COMPUTE]

    def run(self, stage: Stage, op: Op, *after_s: float, count: int = 1) -> float:
        """Submit an operation, and return when it ends (s).

        It begins after everything that was submitted to its stage before, and after all `after_s`.

        count: how many times it runs.
        """
        seconds = self._cost(stage, op) * count
        self.end_s[stage] = max(self.end_s[stage], *after_s, 0.0) + seconds
        self.busy_s[stage] += seconds
        self.num_bytes[stage] += op.num_bytes
        if stage is Stage.COMPUTE:
            self.compute_s[op.name] += seconds
        return self.end_s[stage]

    def wait(self, until_s: float, cause: str) -> None:
        """Make the compute stage wait until a time (s), and count the wait under `cause`."""
        late_s = until_s - self.end_s[Stage.COMPUTE]
        if late_s > 0:
            self.exposed_s[cause] += late_s
            self.end_s[Stage.COMPUTE] = until_s


class Ring:
    """Tracks when each of the regions that layers take in turn is empty."""

    def __init__(self, layers: Sequence[int], needed_bytes: Sequence[int], region_bytes: Sequence[int]) -> None:
        """Assign regions to layers as engine/plan/residency.py does; without regions no layer takes one."""
        self._index = regions_of(layers, needed_bytes, region_bytes) if region_bytes else {}
        self._empty_s: dict[int, float] = {}

    def begin(self) -> None:
        """Begin a step: all regions are empty."""
        self._empty_s.clear()

    def empty_s(self, layer: int) -> float:
        return self._empty_s.get(self._index[layer], 0.0)

    def release(self, layer: int, at_s: float) -> None:
        self._empty_s[self._index[layer]] = at_s
