"""A step as a graph that the device keeps: forward, loss, backward and norms of all its micro-batches, captured before
the first step and launched at once in each. The host then spends no time on layers: where they are small, launching
them one by one takes it longer than the device computes.

For plans in which every layer lives on the device. What a step brings with it is copied to where the capture read it;
what it leaves, gradients and norms, is where the capture wrote it.
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
from megatrain_ray.engine.step.step_runner import StepInput, StepOutput, StepRunner, Submitted, World
from megatrain_ray.engine.step.warm_up import Coming
from megatrain_ray.errors import CaptureError
from megatrain_ray.virtual_clock import Op

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place(MicroBatch):
    """A micro-batch on the device, where a capture reads it. `packed`: rows of its steps have positions."""

    packed: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packed  # the values are not looked at: they are another step's next time

    def fill(self, micro_batch: MicroBatch, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """With one of the same shapes from host memory. `upload`: Device.upload."""
        self.input_ids.copy_(upload(micro_batch.input_ids))
        self.targets.copy_(upload(micro_batch.targets))
        if self.positions is not None and micro_batch.positions is not None:
            self.positions.copy_(upload(micro_batch.positions))


class _Graph(NamedTuple):
    """A captured step: what it reads, and where it leaves what it brings."""

    places: tuple[_Place, ...]
    capture: Capture
    submitted: Submitted
    completed: Completed


class CapturedStep:
    """Launches steps like those that `capture` was told of as graphs, and runs others. Compute thread only."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        runner: StepRunner,
        submit: Callable[[StepInput], Submitted],
        store: GradientStore,
    ) -> None:
        """`submit`: all of a step but the wait at its end, which `runner` does. `store`: where a step leaves gradients
        and norms."""
        self._plan = plan
        self._device = device
        self._runner = runner
        self._submit = submit
        self._store = store
        self._graphs: dict[bool, _Graph] = {}  # by whether rows have positions: all of a step have, or none
        self._num_supervised = torch.ones((), dtype=torch.float32, device=device.torch_device)

    def capture(self, coming: Coming) -> None:
        """Captures a step of each kind to come, or none where one of them cannot be captured: memory is counted for
        one or the other. Raises torch.OutOfMemoryError."""
        try:
            for packed in (False, True) if coming.packed else (False,):
                self._graphs[packed] = self._graph_of(coming, packed=packed)
        except CaptureError as error:
            self.close()
            log.warning("steps run uncaptured, layer by layer: %s", error)

    def run(self, step: StepInput) -> StepOutput:
        """As StepRunner.run, of a step whose update waits for its norm."""
        graph = self._graphs.get(step.micro_batches[0].positions is not None)
        if graph is None or step.world.size > 1:
            return self._runner.read(self._submit(step))
        self._runner.whereabouts = f"step {step.step}, captured"
        for place, micro_batch in zip(graph.places, step.micro_batches, strict=True):
            place.fill(micro_batch, self._device.upload)
        self._num_supervised.fill_(step.world.num_supervised)
        with self._device.timed(Op("captured step", 0)):
            graph.capture.replay()
        self._store.restore(graph.completed)
        return self._runner.read(graph.submitted)

    def close(self) -> None:
        """When the device has nothing to do any more. Idempotent."""
        for graph in self._graphs.values():
            graph.capture.close()
        self._graphs.clear()

    def _graph_of(self, coming: Coming, *, packed: bool) -> _Graph:
        """After the same step uncaptured: what is made when it is first used is there then. Raises CaptureError."""
        places = tuple(self._place(packed=packed) for _ in range(self._plan.num_micro_batches))
        step = StepInput(0, places, World(self._num_supervised), 0, coming.objective)
        self._submit(step)
        found: list[tuple[Submitted, Completed]] = []

        def run() -> tuple[torch.Tensor, ...]:
            with as_uncaptured():
                submitted = self._submit(step)
            completed = self._store.completed()
            found.append((submitted, completed))
            return submitted.values, *completed.norms.values()

        capture = self._device.capture(run)
        return _Graph(places, capture, *found[0])

    def _place(self, *, packed: bool) -> _Place:
        """With tokens that are all the same, in two documents where it is packed."""
        shape, device = (self._plan.micro_batch_size, self._plan.seq_len), self._device.torch_device
        ids, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        positions = torch.arange(self._plan.seq_len, device=device) % (self._plan.seq_len // 2 + 1)
        return _Place(ids, targets, positions.repeat(shape[0], 1) if packed else None, packed)
