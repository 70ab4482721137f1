"""What the GPU worker has moved on the disk: working copies that it reads, activations that it writes and reads."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from megatrain_ray.io.storage.measured_store import NOTHING, Busy, DiskMeter, Moved, Time
from megatrain_ray.io.storage.spill_file import taken_bytes

MAX_STEPS = 256  # whose times are kept


@dataclass(frozen=True)
class GpuWork:
    """Up to the end of a step, and in steps alone: what evaluations read is left out. `num_steps`: that this process
    has made. `busy`: when something of each was under way, up to now. `steps`: when the newest of them were, in their
    order. `spill_bytes`: that the file of activations takes on the disk. `pid`: of the process; another one counts from
    0."""

    num_steps: int
    weights: Moved = NOTHING
    activations: Moved = NOTHING
    busy: tuple[Busy, ...] = ()
    steps: tuple[Time, ...] = ()
    spill_bytes: int = 0
    pid: int = 0


class GpuDisk:
    """`of_weights`, `of_activations`: count what moves, whenever that is."""

    def __init__(self, activation_file: int | None) -> None:
        """`activation_file`: its descriptor, where there is one."""
        self.of_weights, self.of_activations = DiskMeter(), DiskMeter()
        self._file = activation_file
        self._begun = NOTHING, NOTHING
        self._moved = NOTHING, NOTHING
        self._num_steps = 0
        self._steps: deque[Time] = deque(maxlen=MAX_STEPS)

    def begin_step(self) -> None:
        self._begun = self._now()

    def end_step(self, time: Time) -> None:
        """Nothing of the step is under way any more. `time`: from the end of the step before to that of this one."""
        of_step = (now.since(begun) for now, begun in zip(self._now(), self._begun, strict=True))
        weights, activations = (moved.plus(more) for moved, more in zip(self._moved, of_step, strict=True))
        self._moved = weights, activations
        self._num_steps += 1
        self._steps.append(time)

    def work(self) -> GpuWork:
        busy = self.of_weights.busy, self.of_activations.busy
        taken = taken_bytes(self._file) if self._file is not None else 0
        return GpuWork(self._num_steps, *self._moved, busy, tuple(self._steps), taken, os.getpid())

    def _now(self) -> tuple[Moved, Moved]:
        return self.of_weights.moved, self.of_activations.moved
