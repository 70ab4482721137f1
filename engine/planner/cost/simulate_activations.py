"""Simulates when activations are offloaded to the host or to disk, and when they are reloaded.

It follows engine/activations/activation_store.py, which moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain_ray.engine.plan.activation_disk_clock import SimulatedActivationDisk
from megatrain_ray.engine.plan.activation_moves import RETURNING, Activations, away, is_on_disk, needed, num_bytes
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import Phase, Visit
from megatrain_ray.engine.planner.cost.stage_clocks import Clocks
from megatrain_ray.virtual_clock import Op, Stage


class _Move(NamedTuple):
    op: Op
    on_disk: bool


class _Stop(NamedTuple):
    """Describes one micro-batch in a visit of the backward sweep.

    moves: activations that are reloaded for it.
    is_followed: whether the next stop comes at once, so that its reloads are submitted with these.
    sweep: for the first stop of a backward sweep, all that is reloaded from disk in the sweep; else empty.
    """

    moves: list[_Move]
    is_followed: bool
    sweep: list[Op]


class SimulatedActivations:
    """Simulates the activations of one step after the other, one micro-batch at a time."""

    def __init__(self, plan: Plan, visits: Sequence[Visit], clocks: Clocks) -> None:
        """Find the visits that move activations.

        visits: of a step.
        """
        self._clocks = clocks
        self._disk = SimulatedActivationDisk(plan.disk.num_staging_buffers * plan.disk.staging_buffer_bytes, clocks.run)
        self._offloaded = [[_move(plan, i, kind) for kind in away(layer)] for i, layer in enumerate(plan.layers)]
        self._moving: set[int] = set()  # visits for which activations move
        self._stops: list[_Stop] = []  # of these visits, in their order
        if plan.moves_activations:
            self._plan_stops(plan, visits)
        self.begin()

    def _plan_stops(self, plan: Plan, visits: Sequence[Visit]) -> None:
        moves_by_visit = [[_move(plan, i, kind) for kind, i in needed(plan, v.phase, v.layer)] for v in visits]
        sweep: list[Op] | None = None  # reloads from disk in the current backward sweep
        for visit, moves, next_moves in zip(visits, moves_by_visit, [*moves_by_visit[1:], []], strict=True):
            is_first = visit.phase in RETURNING and sweep is None
            if visit.phase is Phase.FORWARD:
                sweep = None
                if self._offloaded[visit.layer]:
                    self._moving.add(visit.index)
            elif visit.phase in RETURNING and (moves or next_moves or (is_first and plan.disk_activations)):
                self._moving.add(visit.index)
                sweep = [] if sweep is None else sweep
                count = len(visit.micro_batches)
                stops = [_Stop(moves, k < count - 1 or bool(next_moves), []) for k in range(count)]
                if is_first:
                    stops[0] = stops[0]._replace(sweep=sweep)
                self._stops += stops
                sweep += [move.op for move in moves if move.on_disk] * count

    def begin(self) -> None:
        """Begin a step."""
        self._out_s = 0.0  # when the last offload had ended
        self._back_s: list[float] = []  # of each stop: when its activations are on the device again
        self._num_stops = 0  # reached so far
        self._disk.begin()

    def moves(self, visit: Visit) -> bool:
        """Return whether activations are offloaded or reloaded for this visit."""
        return visit.index in self._moving

    def offload(self, layer: int) -> None:
        """Offload activations after a layer's forward.

        Their memory is free only after the next offloading forward, which waits here for the offloads before its own.
        """
        before_s = self._out_s
        for op, on_disk in self._offloaded[layer]:
            after_s = self._clocks.computed_s
            left_s = self._disk.offload(op, after_s) if on_disk else self._clocks.run(Stage.D2H, op, after_s)
            self._out_s = max(self._out_s, left_s)
        self._clocks.wait(before_s, "d2h")

    def reload(self) -> None:
        """Reload what the next stop needs and wait for it; also submit the reloads of a stop that follows at once."""
        self._clocks.wait(self._out_s, "d2h")
        this = self._num_stops
        stop = self._stops[this]
        if stop.sweep:
            self._disk.expect(stop.sweep, self._clocks.computed_s)
        for coming in self._stops[len(self._back_s) : this + 1 + stop.is_followed]:
            self._back_s.append(max(map(self._fetch, coming.moves), default=0.0))
        self._clocks.wait(self._back_s[this], "h2d")
        self._num_stops += 1

    def _fetch(self, move: _Move) -> float:
        after_s = self._clocks.computed_s
        return self._disk.reload(move.op, after_s) if move.on_disk else self._clocks.run(Stage.H2D, move.op, after_s)


def _move(plan: Plan, layer: int, kind: Activations) -> _Move:
    layer_plan = plan.layers[layer]
    op = Op(kind.value, layer, num_bytes=num_bytes(layer_plan, kind))
    return _Move(op, is_on_disk(layer_plan, kind))
