"""Simulates when activations reach the disk and return from it, as DiskActivations moves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatrain_ray.virtual_clock import Op, Stage

# As Clocks.run: takes a stage, an operation, and times after which it begins; returns the time at which it ends.
Run = Callable[..., float]


@dataclass
class _Coming:
    """Tracks an activation that is read back from disk: how many of its bytes are read, and until when."""

    op: Op
    num_bytes: int = 0
    read_s: float = 0.0


class SimulatedActivationDisk:
    """Simulates the disk and the staging buffers between it and the device.

    The disk does one transfer at a time. Activations come back in the order that is given to `expect`.
    """

    def __init__(self, room: int, run: Run) -> None:
        """Create a simulation.

        room: bytes of all staging buffers together.
        run: charges an operation to a stage's clock.
        """
        self._room = room
        self._run = run
        self.begin()

    def begin(self) -> None:
        """Start a new step, in which nothing is on disk yet."""
        self._stored_s = 0.0  # when the last activation that left is on disk
        self._coming: deque[_Coming] = deque()

    def offload(self, op: Op, after_s: float) -> float:
        """Return when all bytes of `op` have left the device. What the buffers have no room for is on disk by then.

        after_s: time before which nothing leaves.
        """
        left_s = max(self._run(Stage.D2H, op, after_s), self._stored_s)
        if op.num_bytes > self._room:
            left_s = self._move(op, op.num_bytes - self._room, left_s)
        self._stored_s = self._move(op, min(op.num_bytes, self._room), left_s)
        return left_s

    def expect(self, ops: Iterable[Op], after_s: float) -> None:
        """Announce the order in which activations come back, and read as much as the buffers have room for.

        Call it when all of them have left the device.

        after_s: time before which nothing is read.
        """
        self._coming.extend(map(_Coming, ops))
        self._read_ahead(max(after_s, self._stored_s))

    def reload(self, op: Op, after_s: float) -> float:
        """Return when the next activation, `op`, is back on the device. Later ones are read into the freed buffers.

        after_s: time from which the activation has memory on the device.
        """
        found = self._coming.popleft()
        if found.num_bytes < op.num_bytes:
            found.read_s = self._move(op, op.num_bytes - found.num_bytes, max(after_s, found.read_s))
        back_s = self._run(Stage.H2D, op, after_s, found.read_s)
        self._read_ahead(max(after_s, found.read_s))
        return back_s

    def _read_ahead(self, after_s: float) -> None:
        room = self._room - sum(coming.num_bytes for coming in self._coming)
        for coming in self._coming:
            num_bytes = min(room, coming.op.num_bytes - coming.num_bytes)
            if num_bytes:
                coming.read_s = self._move(coming.op, num_bytes, after_s)
                coming.num_bytes += num_bytes
                room -= num_bytes
            if not room:
                return

    def _move(self, op: Op, num_bytes: int, after_s: float) -> float:
        return self._run(Stage.DISK, replace(op, num_bytes=num_bytes), after_s)
