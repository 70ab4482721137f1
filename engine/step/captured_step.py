"""Captures a whole step as one device graph, and launches that graph in every step.

The graph holds the forward, loss, backward and norms of all micro-batches, so the host spends no time on layers. Where
layers are small, launching their kernels one by one takes the host longer than the device needs to compute them.

This works for one rank, if every layer lives on the device. The inputs of a step are copied to where the capture read
them. Its results, gradients and norms, are where the capture wrote them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.device import Capture, Device
from megatrain_ray.engine.gradients.gradient_store import Completed, GradientStore
from megatrain_ray.engine.model.attention import as_uncaptured
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.step.step_data import StepInput, StepOutput, Submitted
from megatrain_ray.engine.step.step_runner import StepRunner
from megatrain_ray.engine.step.warm_up import WarmUpShapes
from megatrain_ray.errors import CaptureError
from megatrain_ray.virtual_clock import Op

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _StaticInput(MicroBatch):
    """Holds a micro-batch in the device memory that a capture reads."""

    packed: bool = False  # whether rows of the captured steps have positions

    @property
    def is_packed(self) -> bool:
        return self.packed  # does not look at the values: the next step has others

    def fill(self, micro_batch: MicroBatch, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copy a micro-batch of the same shapes from host memory into this one."""
        self.input_ids.copy_(upload(micro_batch.input_ids))
        self.targets.copy_(upload(micro_batch.targets))
        for static, coming in (
            (self.positions, micro_batch.positions),
            (self.loss_weights, micro_batch.loss_weights),
            (self.real, micro_batch.real),
        ):
            if static is not None and coming is not None:
                static.copy_(upload(coming))


class _CapturedGraph(NamedTuple):
    """Holds a captured step: the inputs it reads, the capture itself, and the results it writes."""

    inputs: tuple[_StaticInput, ...]
    capture: Capture
    submitted: Submitted
    completed: Completed


class CapturedStep:
    """Launches steps of the kinds that were captured as graphs; runs all others uncaptured. Compute thread only."""

    def __init__(self, plan: Plan, device: Device, runner: StepRunner, store: GradientStore) -> None:
        self._plan = plan
        self._device = device
        self._runner = runner
        self._store = store  # receives the gradients and norms of a step
        # By whether rows have positions: in a step all rows have, or none has.
        self._graphs: dict[bool, _CapturedGraph] = {}
        self._total_weight = torch.ones((), dtype=torch.float32, device=device.torch_device)

    def capture(self, coming: WarmUpShapes) -> None:
        """Capture a step of each kind described by `coming`, or none if one of them cannot be captured.

        The plan counts memory for captured steps or for uncaptured ones, not for both. Raises torch.OutOfMemoryError.
        """
        try:
            for packed in (False, True) if coming.packed else (False,):
                self._graphs[packed] = self._graph_of(coming, packed=packed)
        except CaptureError as error:
            self.close()
            log.warning("steps run uncaptured, layer by layer: %s", error)

    def run(self, step: StepInput) -> StepOutput:
        """Run a step whose update waits for its norm: uncaptured if no graph fits it."""
        graph = self._graphs.get(step.micro_batches[0].positions is not None)
        if graph is None:
            return self._runner.read(self._runner.submit(step))
        self._runner.current_phase = f"step {step.step}, captured"
        for static, micro_batch in zip(graph.inputs, step.micro_batches, strict=True):
            static.fill(micro_batch, self._device.upload)
        self._total_weight.fill_(step.total_weight)
        with self._device.timed(Op("captured step", 0)):
            graph.capture.replay()
        self._store.restore(graph.completed)
        return self._runner.read(graph.submitted)

    def close(self) -> None:
        """Free the captured graphs. Call when the device has no work left. Idempotent."""
        for graph in self._graphs.values():
            graph.capture.close()
        self._graphs.clear()

    def _graph_of(self, coming: WarmUpShapes, *, packed: bool) -> _CapturedGraph:
        """Capture one step. Raises CaptureError if it cannot be captured."""
        inputs = tuple(self._static_input(coming, packed=packed) for _ in range(self._plan.step.num_micro_batches))
        step = StepInput(0, inputs, self._total_weight, 0, coming.objective)
        self._runner.submit(step)  # uncaptured, to create whatever is made on first use
        found: list[tuple[Submitted, Completed]] = []

        def run() -> tuple[torch.Tensor, ...]:
            with as_uncaptured():
                submitted = self._runner.submit(step)
            completed = self._store.completed()
            found.append((submitted, completed))
            return submitted.values, *completed.norms.values()

        capture = self._device.capture(run)
        return _CapturedGraph(inputs, capture, *found[0])

    def _static_input(self, coming: WarmUpShapes, *, packed: bool) -> _StaticInput:
        """Return a micro-batch of zero tokens for the capture to read, with two documents a row if `packed`."""
        shape, device = (self._plan.step.micro_batch_size, self._plan.step.seq_len), self._device.torch_device
        ids, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        positions = torch.arange(self._plan.step.seq_len, device=device) % (self._plan.step.seq_len // 2 + 1)
        weights = torch.ones(shape, device=device) if coming.weighted else None
        real = torch.ones(shape, dtype=torch.bool, device=device)
        of_rows = positions.repeat(shape[0], 1) if packed else None
        return _StaticInput(ids, targets, of_rows, weights, real, packed=packed)
