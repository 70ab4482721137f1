"""Implements `Device` on the CPU: the compute thread plus one real thread for each transfer stage.

Device memory is ordinary memory that is separate from the host arenas. So every copy and every wait of the CUDA device
happens here too.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Capture, Device, Event, MemoryStatistics
from megatrain_ray.engine.optimizer.adamw import AdamWConstants
from megatrain_ray.engine.optimizer.update_kernel import UpdateKernel, open_kernel
from megatrain_ray.errors import DeadlineError
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Op, Stage, Timeline

TRANSFERS = (Stage.H2D, Stage.D2H, Stage.ALL_GATHER)


class CpuEvent:
    """Completes when its work has run.

    more_s: seconds added to every timeout of `synchronize`, for operations that may take longer than a waiter expects.
    """

    def __init__(self, at_s: float, name: str, more_s: float = 0.0) -> None:
        self.at_s = at_s
        self._name = name
        self._more_s = more_s
        self._future: Future[None] = Future()

    def synchronize(self) -> None:
        timeout_s = DEADLINE_S + self._more_s
        try:
            self._future.result(timeout_s)
        except FutureTimeout:
            raise DeadlineError(f"{self._name} did not finish within {timeout_s:.0f} s") from None

    def run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # raised by `synchronize` in every thread that waits for this event
            self._future.set_exception(error)
        else:
            self._future.set_result(None)


class _TransferThread:
    """Runs transfers in the order of submission."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[CpuEvent, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, event: CpuEvent, work: Callable[[], None]) -> None:
        self._queue.put((event, work))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, work = item
            event.run(work)


class _Rerun:
    """Implements `Capture` by calling the function again, including its Python code."""

    def __init__(self, function: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._function = function
        self.outputs = tuple(function())

    def replay(self) -> None:
        for there, again in zip(self.outputs, self._function(), strict=True):
            there.copy_(again)

    def close(self) -> None:
        pass


class CpuDevice(Device):
    kind = "cpu"

    def __init__(self, timeline: Timeline | None = None, num_threads: int | None = None) -> None:
        """Start the transfer threads.

        num_threads: of the compute thread's operators; results of matrix products depend on it. None: torch's setting.
        """
        super().__init__(timeline)
        self.torch_device = torch.device("cpu")
        self._num_threads = num_threads or torch.get_num_threads()
        self._threads = {stage: _TransferThread(stage.value) for stage in TRANSFERS}

    def _copy(
        self, stage: Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event], end_s: float
    ) -> Event:
        if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError(f"{stage.value}: cannot copy {source.nbytes} bytes into {target.nbytes}")
        event = CpuEvent(end_s, f"{stage.value} copy of {source.nbytes} bytes")

        def move() -> None:  # no torch operator: its OpenMP threads would compete with those of the compute thread
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

        return self._submit(stage, event, move, op, after)

    def _all_gather(self, work: Callable[[], None], op: Op, after: Event, end_s: float, timeout_s: float) -> Event:
        return self._submit(Stage.ALL_GATHER, CpuEvent(end_s, str(op), timeout_s), work, op, [after])

    def _submit(
        self, stage: Stage, event: CpuEvent, work: Callable[[], object], op: Op, after: Sequence[Event]
    ) -> CpuEvent:
        def run() -> None:
            for earlier in after:
                earlier.synchronize()
            with self.spans.span(Row(stage.value), op.name, op.layer, num_bytes=op.num_bytes):
                work()

        self._threads[stage].submit(event, run)
        return event

    def _wait(self, event: Event, cause: str) -> None:
        with self.exposed(cause):
            event.synchronize()

    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        """Return a capture that calls `function` again. It is for tests: it saves no time and refuses nothing."""
        return _Rerun(function)

    def release_unused(self) -> None:
        """Do nothing: ordinary memory is not kept when it is freed."""

    def record(self) -> Event:
        event = CpuEvent(self.timeline.now(Stage.COMPUTE), "compute")
        event.run(lambda: None)  # done at once: the compute thread has already run everything submitted to the stage
        return event

    def open_update_kernel(self, hyper: AdamWConstants) -> UpdateKernel:
        return open_kernel(self._num_threads, hyper)

    @contextmanager
    def activate(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        torch.get_num_threads()  # fixes this thread's setting: later changes in other threads do not affect it
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would look for GPUs on every call

    def pin(self, host: torch.Tensor) -> None:
        """Do nothing: transfers reach all memory."""

    def memory(self) -> MemoryStatistics:
        return MemoryStatistics(*[self._reserved_bytes] * 3)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
        self._threads = {}
