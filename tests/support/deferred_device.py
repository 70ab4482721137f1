"""Simulates a device whose copies run when somebody waits for them, and not before.

Whatever reads or writes memory without having waited for the copy that fills or empties it computes something else,
every time.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Event
from megatrain_ray.virtual_clock import Op, Stage, Timeline


class LateDevice(CpuDevice):
    def __init__(self, timeline: Timeline | None = None, num_threads: int | None = None) -> None:
        super().__init__(timeline, num_threads)
        self._stages: dict[Stage, deque[_LateCopy]] = {Stage.H2D: deque(), Stage.D2H: deque()}
        self._lock = threading.RLock()

    def _copy(
        self, stage: Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event], end_s: float
    ) -> Event:
        with self._lock:
            copy = _LateCopy(end_s, target, source, op, tuple(after), self._stages[stage], self._lock)
            self._stages[stage].append(copy)
        return copy


@dataclass(eq=False)
class _LateCopy:
    """Holds a copy that has not run yet, and is the event of its end.

    `stage`: copies of its stage that have not run, in order.
    """

    at_s: float
    target: torch.Tensor | None
    source: torch.Tensor | None
    op: Op
    after: tuple[Event, ...]
    stage: deque[Any] = field(repr=False)
    lock: threading.RLock = field(repr=False)
    problem: str | None = None

    def synchronize(self) -> None:
        with self.lock:
            while self.target is not None:
                self.stage.popleft().run()
        if self.problem is not None:
            raise RuntimeError(self.problem)

    def run(self) -> None:
        for earlier in self.after:
            earlier.synchronize()
        assert self.target is not None
        assert self.source is not None
        if any(tensor.nbytes > tensor.untyped_storage().nbytes() for tensor in (self.target, self.source)):
            self.problem = f"{self.op}: its memory was freed before"
        else:
            ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.source.nbytes)
        self.target = self.source = None
        self.after = ()
