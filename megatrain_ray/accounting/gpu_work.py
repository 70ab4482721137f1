"""Counts what the GPU worker moves on the disk: working copies (read) and activations (written and read)."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from megatrain_ray.io.storage.measured_store import NOTHING, Busy, DiskMeter, Moved, Time
from megatrain_ray.io.storage.spill_file import taken_bytes

MAX_STEPS = 256  # steps whose times are kept


@dataclass(frozen=True)
class GpuWork:
    """Counts what a GPU worker has moved on disk since its process began, up to the end of a step.

    Only transfers within steps count; what evaluations read is left out.

    num_steps: steps that this process has made.
    weights, activations: bytes read and written.
    busy: when transfers of weights and of activations were under way, up to now; one entry each.
    steps: when the newest `MAX_STEPS` steps were made, oldest first.
    spill_bytes: bytes that the file of activations takes on the disk.
    pid: id of the process. A replacement process has another id and counts from 0.
    """

    num_steps: int
    weights: Moved = NOTHING
    activations: Moved = NOTHING
    busy: tuple[Busy, ...] = ()
    steps: tuple[Time, ...] = ()
    spill_bytes: int = 0
    pid: int = 0


class GpuDisk:
    """Meters the disk traffic of a GPU worker and counts what falls within steps.

    of_weights, of_activations: meters that count every transfer, inside steps and outside.
    """

    def __init__(self, activation_file: int | None) -> None:
        """Create meters that start at 0.

        activation_file: file descriptor of the file of activations; None if there is none.
        """
        self.of_weights, self.of_activations = DiskMeter(), DiskMeter()
        self._file = activation_file
        self._begun = NOTHING, NOTHING
        self._moved = NOTHING, NOTHING
        self._num_steps = 0
        self._steps: deque[Time] = deque(maxlen=MAX_STEPS)

    def begin_step(self) -> None:
        self._begun = self._now()

    def end_step(self, time: Time) -> None:
        """Add the traffic since `begin_step` to the totals. Call when no transfer of the step is under way any more.

        time: from the end of the previous step to the end of this one.
        """
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
