"""When activations are on disk and back, on the clocks of a step: what ActivationFile does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatrain_ray.virtual_clock import Op, Stage

Run = Callable[..., float]  # Clocks.run: when an operation of a stage ends that begins after some times


@dataclass
class _Coming:
    """Something on disk: how much of it has been read, and until when."""

    op: Op
    num_bytes: int = 0
    there_s: float = 0.0


class SimulatedFile:
    """Windows between device and disk, which does one thing after the other. What leaves comes back in the order that
    `expect` is told."""

    def __init__(self, room: int, run: Run) -> None:
        """`room`: bytes of all windows."""
        self._room = room
        self._run = run
        self.begin()

    def begin(self) -> None:
        """A step."""
        self._stored_s = 0.0  # when the last that left is on disk
        self._coming: deque[_Coming] = deque()

    def leave(self, op: Op, after_s: float) -> float:
        """When all of it has left the device: what windows have no room for is on disk by then."""
        left_s = max(self._run(Stage.D2H, op, after_s), self._stored_s)
        if op.num_bytes > self._room:
            left_s = self._move(op, op.num_bytes - self._room, left_s)
        self._stored_s = self._move(op, min(op.num_bytes, self._room), left_s)
        return left_s

    def expect(self, ops: Iterable[Op], after_s: float) -> None:
        """All that left has left, and comes back in this order: as much is read as windows have room for."""
        self._coming.extend(map(_Coming, ops))
        self._read_ahead(max(after_s, self._stored_s))

    def fetch(self, op: Op, after_s: float) -> float:
        """When what comes next is on the device, where it has memory after `after_s`. What comes behind it takes its
        place in the windows."""
        found = self._coming.popleft()
        if found.num_bytes < op.num_bytes:
            found.there_s = self._move(op, op.num_bytes - found.num_bytes, max(after_s, found.there_s))
        back_s = self._run(Stage.H2D, op, after_s, found.there_s)
        self._read_ahead(max(after_s, found.there_s))
        return back_s

    def _read_ahead(self, after_s: float) -> None:
        room = self._room - sum(coming.num_bytes for coming in self._coming)
        for coming in self._coming:
            num_bytes = min(room, coming.op.num_bytes - coming.num_bytes)
            if num_bytes:
                coming.there_s = self._move(coming.op, num_bytes, after_s)
                coming.num_bytes += num_bytes
                room -= num_bytes
            if not room:
                return

    def _move(self, op: Op, num_bytes: int, after_s: float) -> float:
        return self._run(Stage.DISK, replace(op, num_bytes=num_bytes), after_s)
