"""Logs the operations of a step on a virtual clock.

Every operation that a device stage performs is accounted here when it is submitted. It starts when its stage is free,
the operations it depends on have ended, and the host could have submitted it. It lasts what the cost model says. Costs
are counted, never slept, so the log of one plan is the same on every run and every device, and tests can read overlap
from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

SUM_OVER_GPUS = "sum over GPUs"  # name of an operation, shared by the engine, its simulation and its cost model


class Stage(Enum):
    """Names what works concurrently.

    COMPUTE: the compute stream.
    H2D, D2H: the two directions of PCIe.
    ALL_GATHER: what fills slots from other GPUs.
    OPTIMIZER: the optimizer on the host.
    DISK: the disk that state spills to.
    WEIGHTS: the part of that disk's work that reads working copies for the device.
    """

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    ALL_GATHER = "all-gather"
    OPTIMIZER = "optimizer"
    DISK = "disk"
    WEIGHTS = "weights"

    __hash__ = object.__hash__  # Enum's own is Python code, which took a tenth of a simulation


@dataclass(frozen=True)
class Op:
    """Describes an operation: its name, the layer that it works on, and its micro-batch or fragment if it has one."""

    # One of: forward, recompute, backward, loss, load, all-gather, complete, offload, boundary, kept, update, read,
    # write, weights, sum over GPUs.
    name: str
    layer: int
    micro_batch: int = -1
    fragment: int = -1
    num_bytes: int = 0

    def __str__(self) -> str:
        micro_batch = f".{self.micro_batch}" if self.micro_batch >= 0 else ""
        fragment = f"/{self.fragment}" if self.fragment >= 0 else ""
        return f"{self.name}[{self.layer}{micro_batch}{fragment}]"


@dataclass(frozen=True)
class Record:
    """Holds when an operation starts and ends on the virtual clock."""

    stage: Stage
    op: Op
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.stage.value}:{self.op}"


CostModel = Callable[[Stage, Op], float]


def unit_cost(stage: Stage, op: Op) -> float:
    """Return one second for every operation."""
    return 1.0


class Timeline:
    """Accounts the operations of the current step. Thread-safe; `clear` between steps bounds its memory."""

    def __init__(self, cost: CostModel = unit_cost) -> None:
        self._cost = cost
        self._lock = threading.Lock()
        self._stage_end = dict.fromkeys(Stage, 0.0)
        self._records: list[Record] = []
        # Virtual time that the host has reached, before which it submits nothing more. Each thread and asyncio task has
        # its own context, so a task that waited for a transfer delays only what it submits afterwards.
        self._host_time: ContextVar[float] = ContextVar("host_time", default=0.0)

    def account(self, stage: Stage, op: Op, after: Iterable[float] = ()) -> float:
        """Account an operation, and return when it ends on the virtual clock (seconds).

        after: when the operations end that it depends on.
        """
        with self._lock:
            start = max(self._stage_end[stage], self._host_time.get(), *after, 0.0)
            end = start + self._cost(stage, op)
            self._stage_end[stage] = end
            self._records.append(Record(stage, op, start, end))
            return end

    def now(self, stage: Stage) -> float:
        """Return when the last operation of a stage ends (seconds)."""
        with self._lock:
            return self._stage_end[stage]

    def stage_waits(self, stage: Stage, until_s: float) -> None:
        """Let a stage do nothing before `until_s`."""
        with self._lock:
            self._stage_end[stage] = max(self._stage_end[stage], until_s)

    def host_waits(self, until_s: float) -> None:
        """Record that the calling thread or task learned of something that happened at `until_s`."""
        self._host_time.set(max(self._host_time.get(), until_s))

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the records in order of start. Operations that start together are in the order of the stages."""
        order = {stage: i for i, stage in enumerate(Stage)}
        with self._lock:
            return tuple(sorted(self._records, key=lambda r: (r.start_s, order[r.stage])))

    def clear(self) -> None:
        """Forget the records, not the clocks."""
        with self._lock:
            self._records.clear()
