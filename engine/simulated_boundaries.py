"""When what enters layers leaves for the host and comes back, as boundaries.py moves it."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.engine.simulated_clocks import Clocks
from megatrain_ray.engine.visits import Phase, Visit
from megatrain_ray.trace import Op, Stage


class SimulatedBoundaries:
    """Of one step after the other. One micro-batch at a time."""

    def __init__(self, plan: Plan, visits: Sequence[Visit], clocks: Clocks) -> None:
        """`visits`: of a step."""
        self._clocks = clocks
        self._num_bytes = [x.boundary_bytes if x.boundary is Tier.HOST else 0 for x in plan.layers]
        moving = (visit for visit in visits if visit.phase is Phase.BACKWARD and self.moves(visit.layer))
        self._order = [visit.layer for visit in moving for _ in visit.micro_batches]  # in which they come back
        self.begin()

    def begin(self) -> None:
        """A step."""
        self._out_s = 0.0  # when the last one had left
        self._back_s: list[float] = []  # in the order of the backward
        self._num_left, self._num_backwards = 0, 0  # so far

    def moves(self, layer: int) -> bool:
        return self._num_bytes[layer] > 0

    def leave(self, layer: int) -> None:
        """What entered leaves behind its forward, and frees its memory behind the next one's."""
        before_s = self._out_s
        self._out_s = self._clocks.run(Stage.D2H, self._op(layer), self._clocks.computed_s)
        self._clocks.wait(before_s, "d2h")
        self._num_left += 1

    def bring_back(self) -> None:
        """What the next backward needs is on its way, too, where it has left already."""
        self._clocks.wait(self._out_s, "d2h")
        this = self._num_backwards
        for layer in self._order[len(self._back_s) : min(this + 2, self._num_left)]:
            self._back_s.append(self._clocks.run(Stage.H2D, self._op(layer), self._clocks.computed_s))
        self._clocks.wait(self._back_s[this], "h2d")
        self._num_backwards += 1

    def _op(self, layer: int) -> Op:
        return Op("boundary", layer, num_bytes=self._num_bytes[layer])
