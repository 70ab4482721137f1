"""The device seam: stages that run concurrently (compute, h2d, d2h, and all-gathers where there are several
devices), events that order them, and memory.

Order between stages is by events, on the device; the host never waits for a transfer to let another begin. One thread
(the compute thread) runs everything that builds or walks autograd graphs; copies may be submitted from any thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatrain_ray.engine.device.block_checksum import host_checksum
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.optimizer.adamw import Hyper
from megatrain_ray.engine.optimizer.update_kernel import UpdateKernel
from megatrain_ray.io.storage.blob_store import Block
from megatrain_ray.spans import Row, Span, SpanLog
from megatrain_ray.virtual_clock import Op, Stage, Timeline

# A CUDA context and its libraries: on an H200 NVML had 0.95 GB more than all tensors at their most (7.6b_16x4096 in
# benchmarks/README.md). hardware.hbm_limit leaves as much for them.
CONTEXT_BYTES = 1 << 30


class Event(Protocol):
    """A point in the order of a stage."""

    at_s: float  # on the virtual clock

    def synchronize(self, timeout_s: float = DEADLINE_S) -> None:
        """Blocks the host until the stage has come here. Raises what the operation raised."""


@dataclass(frozen=True)
class MemoryStatistics:
    reserved_bytes: int  # asked for through `allocate`: slots, gradient slots, sums
    peak_bytes: int  # of all tensors on the device; equals reserved_bytes where the device cannot tell


class Capture(Protocol):
    """Operations of the compute stage, to be submitted again and again."""

    outputs: tuple[torch.Tensor, ...]  # overwritten by every replay

    def replay(self) -> None:
        """Submits them. Compute thread only."""

    def close(self) -> None:
        """Gives their memory back, once they have run. Idempotent."""


class Device(ABC):
    """A place that computes. Implementations: CpuDevice (a thread for each stage), CudaDevice (a stream)."""

    kind: str
    torch_device: torch.device

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self.spans = SpanLog()
        self._reserved_bytes = 0
        self._exposed_s: dict[str, float] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor on the device, 512-byte aligned, that lives as long as the caller keeps it."""
        self._reserved_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, stage: Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event]) -> Event:
        """Submits a copy to a transfer stage; it begins after the given events. Returns the event of its end."""
        end_s = self.timeline.account(stage, op, [e.at_s for e in after])
        return self._copy(stage, target, source, op, after, end_s)

    def copy_all(
        self, stage: Stage, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], op: Op, after: Sequence[Event]
    ) -> Event:
        """The same of several, at least one, of (target, source): one operation, whose event is that of the last."""
        end_s = self.timeline.account(stage, op, [e.at_s for e in after])
        return self.copy_part(stage, pairs, op, after, end_s)

    def copy_part(
        self,
        stage: Stage,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        op: Op,
        after: Sequence[Event],
        end_s: float,
    ) -> Event:
        """The same of some pairs of an operation that is on the virtual clock already, and ends at `end_s`."""
        for target, source in pairs:
            after = [self._copy(stage, target, source, replace(op, num_bytes=source.nbytes), after, end_s)]
        return after[-1]

    def all_gather(self, work: Callable[[], None], op: Op, after: Event, timeout_s: float) -> Event:
        """Submits to its own stage what fetches from other devices, after the event. `work`: submits it, on a thread
        of any kind. `timeout_s`: that those may take, for whoever waits on the host."""
        end_s = self.timeline.account(Stage.ALL_GATHER, op, [after.at_s])
        return self._all_gather(work, op, after, end_s, timeout_s)

    def block(self, memory: torch.Tensor) -> Block:
        """1-D uint8 memory, of the host or of the device, as a BlobStore is given it."""
        return memory.numpy().data

    def checksum(self, block: Block) -> int:
        """The sum of its 64-bit words, now: behind nothing that was submitted, so that has ended which writes to the
        block. From any thread."""
        return host_checksum(block)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a small tensor of ordinary memory, in the order of the compute stage, which the host
        does not wait for; of what is there, that itself. Compute thread only."""
        return host.to(self.torch_device)

    @contextmanager
    def compute(self, op: Op) -> Iterator[None]:
        """Operations of the block belong to `op`. Compute thread only."""
        self.timeline.account(Stage.COMPUTE, op)
        with self.timed(op):
            yield
        self.timeline.host_waits(self.timeline.now(Stage.COMPUTE))

    def timed(self, op: Op) -> AbstractContextManager[None]:
        """While traced, operations of the block are a span of the compute stage; the virtual clock knows nothing of it.
        Compute thread only."""
        return self.spans.span(Row.COMPUTE, op.name, op.layer, op.micro_batch, op.num_bytes)

    def wait(self, event: Event, cause: str) -> None:
        """The compute stage waits for the event; the time it stands still is exposed time of that cause."""
        self.timeline.stage_waits(Stage.COMPUTE, event.at_s)
        self._wait(event, cause)

    @contextmanager
    def exposed(self, cause: str) -> Iterator[None]:
        """The compute thread waits on the host in this block; it is exposed time as far as the compute stage stands
        still."""
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
        """Seconds the compute stage waited since the last call, by cause."""
        taken, self._exposed_s = self._exposed_s, {}
        return taken

    def start_tracing(self) -> None:
        """From here on `spans` are recorded. Compute thread only, between steps."""
        self.spans.on = True

    def stop_tracing(self) -> None:
        """Spans of what was submitted are complete on return. Compute thread only, between steps."""
        self.spans.on = False

    def add(self, total: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """out = total + value, rounded once; `out`: another tensor like `total`, or that itself. Compute thread
        only."""
        torch.add(total, value, out=out)

    def add_two(self, total: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        """The same of two values, one after the other: rounded after each, as by two calls. `total` None: zeros."""
        if total is None:
            out.copy_(first)
        else:
            self.add(total, first, out)
        self.add(out, second, out)

    @abstractmethod
    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        """What `function` submits, which was run before; its outputs are what the function returns. A replay reads and
        writes memory where the function did when it was captured, and need run none of its Python code. Compute thread
        only, between steps.

        Raises CaptureError where replays would not do the same again: because random numbers are drawn, or because the
        host waits for the device or reads memory of its own.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event after everything submitted to the compute stage so far."""

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
        """Makes the calling thread the compute thread for the block (current stream, SDPA selection)."""

    @abstractmethod
    def open_update_kernel(self, hyper: Hyper) -> UpdateKernel:
        """What updates state in the device's own memory; it takes no transactions."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds the generators that dropout draws from (63-bit seed)."""

    @abstractmethod
    def pin(self, host: torch.Tensor) -> None:
        """Makes host memory directly reachable by transfers until `close`."""

    @abstractmethod
    def memory(self) -> MemoryStatistics: ...

    def free_bytes(self) -> int | None:
        """Memory of the device that no process holds; None where it is the host's."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Waits for what was submitted and frees threads, streams and pinned ranges. Idempotent."""
