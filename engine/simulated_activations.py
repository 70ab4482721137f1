"""When activations leave for the host and come back, as activation_store.py moves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain_ray.engine.activation_moves import RETURNING, Activations, away, needed, num_bytes
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.simulated_clocks import Clocks
from megatrain_ray.engine.visits import Phase, Visit
from megatrain_ray.trace import Op, Stage


class _Stop(NamedTuple):
    """One micro-batch in a visit: what it needs, and whether the next one comes at once."""

    ops: list[Op]
    is_followed: bool


class SimulatedActivations:
    """Of one step after the other. One micro-batch at a time."""

    def __init__(self, plan: Plan, visits: Sequence[Visit], clocks: Clocks) -> None:
        """`visits`: of a step."""
        self._clocks = clocks
        self._leaving = [[_op(plan, i, kind) for kind in away(layer)] for i, layer in enumerate(plan.layers)]
        self._moving: set[int] = set()  # visits
        self._stops: list[_Stop] = []  # of these, in their order
        if plan.moves_activations:
            self._note(plan, visits)
        self.begin()

    def _note(self, plan: Plan, visits: Sequence[Visit]) -> None:
        of_visits = [[_op(plan, v.layer, kind) for kind in needed(plan, v.phase, v.layer)] for v in visits]
        for visit, ops, of_next in zip(visits, of_visits, [*of_visits[1:], []], strict=True):
            if visit.phase in RETURNING and (ops or of_next):
                self._moving.add(visit.index)
                others = [_Stop(ops, True)] * (len(visit.micro_batches) - 1)
                self._stops += [*others, _Stop(ops, bool(of_next))]
            elif visit.phase is Phase.FORWARD and self._leaving[visit.layer]:
                self._moving.add(visit.index)

    def begin(self) -> None:
        """A step."""
        self._out_s = 0.0  # when the last one had left
        self._back_s: list[float] = []  # of each stop: when what it needs is there
        self._num_stops = 0  # so far

    def moves(self, visit: Visit) -> bool:
        """Whether anything leaves or comes for it."""
        return visit.index in self._moving

    def leave(self, layer: int) -> None:
        """What leaves behind a forward frees its memory behind the next one's."""
        before_s = self._out_s
        for op in self._leaving[layer]:
            self._out_s = self._clocks.run(Stage.D2H, op, self._clocks.computed_s)
        self._clocks.wait(before_s, "d2h")

    def bring_back(self) -> None:
        """What the next stop needs is on its way, too."""
        self._clocks.wait(self._out_s, "d2h")
        this = self._num_stops
        for stop in self._stops[len(self._back_s) : this + 1 + self._stops[this].is_followed]:
            self._back_s.append(0.0)
            for op in stop.ops:
                self._back_s[-1] = self._clocks.run(Stage.H2D, op, self._clocks.computed_s)
        self._clocks.wait(self._back_s[this], "h2d")
        self._num_stops += 1


def _op(plan: Plan, layer: int, kind: Activations) -> Op:
    return Op(kind.value, layer, num_bytes=num_bytes(plan.layers[layer], kind))
