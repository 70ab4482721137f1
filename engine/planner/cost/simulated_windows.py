"""Simulates when working copies on disk are read into windows of host memory, as DiskWeights does it."""

from __future__ import annotations

from collections import deque

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.planner.cost.simulate_disk import Run
from megatrain_ray.virtual_clock import Op, Stage


class SimulatedWindows:
    """Simulates the windows that fragments of working copies take in turn on their way from disk to the device.

    What updates read and write meanwhile has a clock of its own. The price of a read allows for that (op_costs.py).
    """

    def __init__(self, plan: Plan, layout: ModelLayout, run: Run) -> None:
        self._run = run
        self._layers = plan.weights_on_disk
        self._fragments = [layer.fragments for layer in layout.layers]
        self._itemsize = plan.precision.working_dtype.itemsize
        self._empty_s = deque([0.0] * plan.disk.num_upload_buffers)

    def fill(self, fragment: FragmentId, written_s: float, start_s: float) -> float:
        """Return when a fragment is in host memory (s).

        written_s: when its generation is on disk.
        start_s: when the step began.
        """
        if fragment.layer not in self._layers:
            return written_s
        num_bytes = self._fragments[fragment.layer][fragment.index].size * self._itemsize
        op = Op("weights", fragment.layer, fragment=fragment.index, num_bytes=num_bytes)
        return self._run(Stage.WEIGHTS, op, self._empty_s.popleft(), written_s, start_s)

    def leave(self, fragment: FragmentId, uploaded_s: float) -> None:
        if fragment.layer in self._layers:
            self._empty_s.append(uploaded_s)
