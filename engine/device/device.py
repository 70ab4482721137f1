"""Defines the device interface: concurrent stages, the events that order them, and device memory.

The stages are compute, h2d, d2h, and all-gathers where there are several devices. Events order the stages on the
device. The host never waits for one transfer in order to start another. One thread (the compute thread) runs everything
that builds or walks autograd graphs. Copies may be submitted from any thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatrain_ray.engine.optimizer.adamw import AdamWConstants
from megatrain_ray.engine.optimizer.update_kernel import UpdateKernel
from megatrain_ray.spans import Row, Span, SpanLog
from megatrain_ray.virtual_clock import Op, Stage, Timeline

# Memory of a CUDA context and of the kernels of libraries, where it was not measured. On an H200, NVML showed 0.95 GB
# more than the peak of all tensors (7.6b_16x4096 in benchmarks/README.md), on an H100 0.79 GB.
CONTEXT_BYTES = 1 << 30


class Event(Protocol):
    """Marks a point in the order of a stage's operations."""

    at_s: float  # seconds on the virtual clock

    def synchronize(self) -> None:
        """Block the host until the stage has reached this event. Raises what the operation raised."""


@dataclass(frozen=True)
class MemoryStatistics:
    reserved_bytes: int  # total requested from `allocate`: slots, gradient slots, sums
    peak_bytes: int  # peak of all tensors on the device; equals reserved_bytes if the device does not measure it
    held_bytes: int  # what the allocator of tensors holds now, used or not; reserved_bytes likewise
    num_retries: int = 0  # how often it had to give back what it held, because it had reached its limit


class Capture(Protocol):
    """Holds captured operations of the compute stage, which can be submitted again and again."""

    outputs: tuple[torch.Tensor, ...]  # overwritten by every replay

    def replay(self) -> None:
        """Submit the captured operations. Compute thread only."""

    def close(self) -> None:
        """Release the memory of the captured operations once they have run. Idempotent."""


class Device(ABC):
    """Abstracts a device that computes. CpuDevice runs a thread for each stage, CudaDevice a stream for each stage."""

    kind: str
    torch_device: torch.device

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self.spans = SpanLog()
        self._reserved_bytes = 0
        self._exposed_s: dict[str, float] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate a 1-D uint8 tensor on the device, 512-byte aligned. It lives as long as the caller keeps it."""
        self._reserved_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in memory for tensors that outlive a layer's work. Compute thread only."""
        with self.settling():
            return tensor.clone()

    def settling(self) -> AbstractContextManager[None]:
        """Return a context whose allocations lie apart from the temporary tensors of a layer's work."""
        return nullcontext()

    def copy(self, stage: Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event]) -> Event:
        """Submit a copy to a transfer stage, which begins after the events in `after`. Return the event of its end."""
        end_s = self.timeline.account(stage, op, [e.at_s for e in after])
        return self._copy(stage, target, source, op, after, end_s)

    def copy_all(
        self, stage: Stage, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], op: Op, after: Sequence[Event],
        end_s: float | None = None,
    ) -> Event:  # fmt: skip
        """Submit copies of (target, source) pairs as one operation, and return the event of the last copy.

        after: events after which the first copy begins.
        end_s: end of the operation on the virtual clock in seconds, if it is already accounted there. The pairs may
            then be only part of the operation's.
        """
        if end_s is None:
            end_s = self.timeline.account(stage, op, [e.at_s for e in after])
        for target, source in pairs:
            after = [self._copy(stage, target, source, replace(op, num_bytes=source.nbytes), after, end_s)]
        return after[-1]

    def all_gather(self, work: Callable[[], None], op: Op, after: Event, timeout_s: float) -> Event:
        """Submit a transfer from other devices, which begins after `after`, and return the event of its end.

        work: submits the transfer; it may be called on any thread.
        timeout_s: seconds that the other devices may take, for a host thread that waits for the event.
        """
        end_s = self.timeline.account(Stage.ALL_GATHER, op, [after.at_s])
        return self._all_gather(work, op, after, end_s, timeout_s)

    @abstractmethod
    def release_unused(self) -> None:
        """Release memory that is reserved and not in use, so that other processes can have it. Compute thread only."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy of a small tensor of ordinary host memory on the device, or the tensor if it is there already.

        The copy runs in the order of the compute stage, and the host does not wait for it. Compute thread only.
        """
        return host.to(self.torch_device)

    @contextmanager
    def compute(self, op: Op) -> Iterator[None]:
        """Account the operations of the block as `op` on the virtual clock and in the trace. Compute thread only."""
        self.timeline.account(Stage.COMPUTE, op)
        with self.timed(op):
            yield
        self.timeline.host_waits(self.timeline.now(Stage.COMPUTE))

    def timed(self, op: Op) -> AbstractContextManager[None]:
        """Record the operations of the block as a span of the compute stage, but not on the virtual clock.

        Compute thread only. Does nothing while tracing is off.
        """
        return self.spans.span(Row.COMPUTE, op.name, op.layer, op.micro_batch, op.num_bytes)

    def wait(self, event: Event, cause: str) -> None:
        """Make the compute stage wait for `event`. The time it stands still is exposed time under `cause`."""
        self.timeline.stage_waits(Stage.COMPUTE, event.at_s)
        self._wait(event, cause)

    @contextmanager
    def exposed(self, cause: str) -> Iterator[None]:
        """Count the block, in which the compute thread waits on the host, as exposed time under `cause`.

        It counts only as far as the compute stage stands still.
        """
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            end_ns = time.monotonic_ns()
            self.add_exposed(cause, (end_ns - start_ns) / 1e9)
            if self.spans.on:
                self.spans.add(Span(Row.COMPUTE, f"wait {cause}", start_ns, end_ns, waits=True))

    def add_exposed(self, cause: str, seconds: float) -> None:
        self._exposed_s[cause] = self._exposed_s.get(cause, 0.0) + seconds

    def take_exposed(self) -> dict[str, float]:
        """Return the seconds that the compute stage waited since the last call, by cause, and reset them."""
        taken, self._exposed_s = self._exposed_s, {}
        return taken

    def start_tracing(self) -> None:
        """Record `spans` from here on. Compute thread only, between steps."""
        self.spans.on = True

    def stop_tracing(self) -> None:
        """Stop recording spans; those of all submitted work are complete then. Compute thread only, between steps."""
        self.spans.on = False

    def add(self, total: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out = total + value, rounded once; `out` may be `total`. Compute thread only."""
        torch.add(total, value, out=out)

    def add_two(self, total: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out = total + first + second, in this order and rounded after each. A `total` of None means zeros."""
        if total is None:
            out.copy_(first)
        else:
            self.add(total, first, out)
        self.add(out, second, out)

    @abstractmethod
    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        """Capture what `function` submits to the compute stage. Compute thread only, between steps.

        The function must have run once before, and its results are the capture's outputs. A replay uses the same memory
        as the function did during the capture, and need not run its Python code.

        Raises CaptureError if a replay would not repeat the same work: because random numbers are drawn, or because the
        host waits for the device or reads host memory.
        """

    @abstractmethod
    def record(self) -> Event:
        """Return an event ordered after everything submitted to the compute stage so far."""

    @abstractmethod
    def _copy(
        self, stage: Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event], end_s: float
    ) -> Event: ...

    @abstractmethod
    def _all_gather(self, work: Callable[[], None], op: Op, after: Event, end_s: float, timeout_s: float) -> Event: ...

    @abstractmethod
    def _wait(self, event: Event, cause: str) -> None: ...

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Make the calling thread the compute thread for the block (current stream, SDPA selection)."""

    @abstractmethod
    def open_update_kernel(self, hyper: AdamWConstants) -> UpdateKernel:
        """Open the kernel that updates optimizer state in device memory. It supports no transactions."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the generators that dropout draws from (63-bit seed)."""

    @abstractmethod
    def pin(self, host: torch.Tensor) -> None:
        """Pin host memory, so that transfers reach it directly until `close`."""

    @abstractmethod
    def memory(self) -> MemoryStatistics: ...

    def free_bytes(self) -> int | None:
        """Return the bytes of device memory that no process holds; None if device memory is host memory."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for all submitted work, then release threads, streams and pinned ranges. Idempotent."""
