"""Implements `Device` with CUDA, a stream for each stage. Only this file and cuda_info.py use `torch.cuda`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain_ray.engine.device.cuda_info import expand_segments, reserved_bytes, total_memory_bytes
from megatrain_ray.engine.device.device import CONTEXT_BYTES, Capture, Device, Event, MemoryStatistics
from megatrain_ray.engine.optimizer.adamw import AdamWConstants
from megatrain_ray.engine.optimizer.update_kernel import UpdateKernel
from megatrain_ray.errors import CaptureError, ConfigError, MegatrainError
from megatrain_ray.spans import MAX_SPANS, Row, Span
from megatrain_ray.virtual_clock import Op, Stage, Timeline

# Host memory is registered in ranges of at most this size: larger single ranges failed on some drivers.
REGISTER_BYTES = 32 << 30


class CudaEvent:
    """Wraps a CUDA event. It is created with `blocking`, so a host thread that waits sleeps instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream, at_s: float) -> None:
        self.at_s = at_s
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaDevice(Device):
    kind = "cuda"

    def __init__(
        self,
        timeline: Timeline | None = None,
        *,
        deterministic: bool = False,
        tf32: bool = False,
        memory_bytes: int | None = None,
        context_bytes: int = CONTEXT_BYTES,
    ) -> None:
        """Create the streams and set torch's memory limit and numerics. Raises ConfigError if torch sees no GPU.

        memory_bytes: GPU memory that the process may use; None: all of it.
        context_bytes: the part of it that is not for tensors.
        """
        super().__init__(timeline)
        if not torch.cuda.is_available():
            raise ConfigError("hardware.device is cuda, but torch sees no GPU here; set hardware.device: cpu, or auto")
        expand_segments()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        _limit_memory(None if memory_bytes is None else memory_bytes - context_bytes)
        self._deterministic = deterministic
        # Kernels of a stream with high priority start before waiting kernels of the compute stage. A copy within the
        # device may be a kernel.
        self._streams = {stage: torch.cuda.Stream(priority=-1) for stage in (Stage.H2D, Stage.D2H)}
        self._streams[Stage.COMPUTE] = torch.cuda.Stream()
        self._streams[Stage.ALL_GATHER] = torch.cuda.Stream(priority=-1)
        self._generator = torch.cuda.default_generators[self.torch_device.index]
        self._settled = torch.cuda.MemPool()
        self._pinned: list[int] = []
        self._waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._traced: list[tuple[Span, torch.cuda.Event, torch.cuda.Event]] = []  # spans whose times are not known yet
        self._base = (torch.cuda.Event(enable_timing=True), 0)
        _set_numerics(deterministic, tf32)

    def settling(self) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._settled)

    def _copy(
        self, stage: Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event], end_s: float
    ) -> Event:
        stream = self._streams[stage]
        with torch.cuda.stream(stream), torch.no_grad():
            for earlier in after:
                stream.wait_event(_cuda(earlier))
            # `.data` has its own version counter. All slots are views of one allocation and share one counter: a copy
            # into one slot must not look to autograd like a write to the weights in another slot.
            with self._traced_on(stage, op):
                for part in self._registered_parts(source if source.device.type == "cpu" else target):
                    target.data[part].copy_(source[part], non_blocking=True)
        return CudaEvent(stream, end_s)

    def _all_gather(self, work: Callable[[], None], op: Op, after: Event, end_s: float, timeout_s: float) -> Event:
        stream = self._streams[Stage.ALL_GATHER]
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(_cuda(after))
            with self._traced_on(Stage.ALL_GATHER, op):
                work()
        return CudaEvent(stream, end_s)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        if host.is_cuda:
            return host
        # A copy from pageable memory would make the host wait until the stream has reached the copy.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def _wait(self, event: Event, cause: str) -> None:
        awaited = _cuda(event)
        if awaited.query():  # nothing to wait for, and nothing to measure
            return
        with self.exposed(cause):
            self._streams[Stage.COMPUTE].wait_event(awaited)

    @contextmanager
    def exposed(self, cause: str) -> Iterator[None]:
        """Count the wait by the stream's time: while the host waits, the stream may still run earlier work."""
        with self._between_events(Stage.COMPUTE) as (before, after):
            yield
        self._waits.append((cause, before, after))
        self._trace(Span(Row.COMPUTE, f"wait {cause}", 0, 0, waits=True), before, after)

    def timed(self, op: Op) -> AbstractContextManager[None]:
        return self._timed(op) if self.spans.on else nullcontext()

    @contextmanager
    def _timed(self, op: Op) -> Iterator[None]:
        """Record the block as a span of the compute stage, and as a span of the host: the time spent submitting."""
        with self._traced_on(Stage.COMPUTE, op), self.spans.span(Row.SUBMIT, op.name, op.layer, op.micro_batch):
            yield

    @contextmanager
    def _traced_on(self, stage: Stage, op: Op) -> Iterator[None]:
        """Record what the block submits to the stage's stream as one span, while tracing is on."""
        if not self.spans.on:
            yield
            return
        with self._between_events(stage) as (before, after):
            yield
        self._trace(Span(Row(stage.value), op.name, 0, 0, op.layer, op.micro_batch, op.num_bytes), before, after)

    @contextmanager
    def _between_events(self, stage: Stage) -> Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self._streams[stage])
        yield before, after
        after.record(self._streams[stage])

    def _trace(self, span: Span, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        if not self.spans.on:
            return
        if len(self._traced) < MAX_SPANS:
            self._traced.append((span, before, after))
        else:
            self.spans.num_dropped += 1

    def start_tracing(self) -> None:
        """Start recording spans. The base event ties the stream's time to the host's clock."""
        base, _ = self._base
        base.record(self._streams[Stage.COMPUTE])
        base.synchronize()
        self._base = (base, time.monotonic_ns())
        super().start_tracing()

    def stop_tracing(self) -> None:
        super().stop_tracing()
        base, base_ns = self._base
        for span, before, after in self._traced:
            after.synchronize()
            start_ns, end_ns = (base_ns + round(1e6 * base.elapsed_time(event)) for event in (before, after))
            self.spans.add(span._replace(start_ns=start_ns, end_ns=end_ns))
        self._traced.clear()

    def take_exposed(self) -> dict[str, float]:
        """Return the waits of the host and of the compute stream. All work of the stream must have finished."""
        for cause, before, after in self._waits:
            after.synchronize()
            self.add_exposed(cause, before.elapsed_time(after) / 1000)
        self._waits.clear()
        return super().take_exposed()

    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        return CudaCapture(self._streams[Stage.COMPUTE], self._generator, function)

    def record(self) -> Event:
        return CudaEvent(self._streams[Stage.COMPUTE], self.timeline.now(Stage.COMPUTE))

    @contextmanager
    def activate(self) -> Iterator[None]:
        with ExitStack() as stack:
            torch.cuda.set_device(self.torch_device)
            stack.enter_context(torch.cuda.stream(self._streams[Stage.COMPUTE]))
            stack.enter_context(sdpa_kernel(self._attention_backends(), set_priority=True))
            # Run backwards on this thread instead of on autograd's own, which would pass the interpreter's lock back
            # and forth: 0.94 ms for a small compiled layer instead of 1.34 ms, in two runs of which the second was
            # faster in its forwards too (benchmarks/history.md, control path).
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    def _attention_backends(self) -> list[SDPBackend]:
        """Return the attention backends in order of preference.

        A compiled layer uses the backend chosen while it was traced. Tracing happens in a rehearsal, which runs on the
        compute thread (Engine.on_compute_thread) within `activate`.
        """
        flash, math = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
        if self._deterministic:  # the backward of cuDNN's is not
            return [flash, math]
        # cuDNN has 1.8 times flash attention's rate on Hopper.
        return [SDPBackend.CUDNN_ATTENTION, flash, SDPBackend.EFFICIENT_ATTENTION, math]

    def open_update_kernel(self, hyper: AdamWConstants) -> UpdateKernel:
        from megatrain_ray.engine.optimizer.triton_kernel import open_triton  # torch without CUDA has no Triton

        return open_triton(hyper, self.torch_device)

    def add(self, total: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        from megatrain_ray.engine.device import triton_sums  # as above

        if triton_sums.can_add(total, value, out):
            triton_sums.add(total, value, out)
        else:
            super().add(total, value, out)

    def add_two(self, total: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        from megatrain_ray.engine.device import triton_sums  # as above

        if all(triton_sums.can_add(out if total is None else total, value, out) for value in (first, second)):
            triton_sums.add_two(total, first, second, out)
        else:
            super().add_two(total, first, second, out)

    def seed(self, seed: int) -> None:
        if not torch.cuda.is_current_stream_capturing():  # captured work draws no random numbers
            self._generator.manual_seed(seed)

    def pin(self, host: torch.Tensor) -> None:
        runtime = torch.cuda.cudart()
        for start in range(0, host.nbytes, REGISTER_BYTES):
            address = host.data_ptr() + start
            result = runtime.cudaHostRegister(address, min(REGISTER_BYTES, host.nbytes - start), 0)
            if int(result) != 0:
                torch.cuda.synchronize()  # clears the error, which the next call would report as its own
                raise MegatrainError(f"cudaHostRegister of {host.nbytes} bytes failed: {result}; check ulimit -l")
            self._pinned.append(address)

    def _registered_parts(self, host: torch.Tensor) -> list[slice]:
        """Cut a 1-D host tensor where registered ranges meet: CUDA refuses a copy that crosses two of them."""
        cuts = sorted((a - host.data_ptr()) // host.itemsize for a in self._pinned)
        inside = [cut for cut in cuts if 0 < cut < host.numel()]
        return [slice(a, b) for a, b in itertools.pairwise([0, *inside, host.numel()])]

    def memory(self) -> MemoryStatistics:
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return MemoryStatistics(self._reserved_bytes, torch.cuda.max_memory_allocated(), reserved_bytes(), retries)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def close(self) -> None:
        torch.cuda.synchronize()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()


class CudaCapture:
    """Wraps a CUDA graph. The memory that it needs besides its outputs is a pool of its own while this object lives."""

    def __init__(
        self, stream: torch.cuda.Stream, generator: torch.Generator, function: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: meanwhile other threads submit copies and query events, which cannot harm the capture.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = tuple(function())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # CUDA's, torch's and a model's own
            # After an aborted capture the generator still believes that the capture is running: reset its state.
            generator.graphsafe_set_state(generator.clone_state())
            raise CaptureError(str(error)) from error
        before = generator.get_offset()
        self._graph.replay()
        if generator.get_offset() != before:
            raise CaptureError("it draws random numbers, which would be the same in every step")

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.outputs = ()
        self._graph.reset()


def _limit_memory(num_bytes: int | None) -> None:
    """Limit torch's allocator to `num_bytes` of the GPU; None removes the limit.

    The limit is always set, because a device made earlier may have set another one.
    """
    total = total_memory_bytes() or 1
    share = 1.0 if num_bytes is None else max(0, num_bytes) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def _cuda(event: Event) -> torch.cuda.Event:
    if not isinstance(event, CudaEvent):
        raise TypeError(f"an event of another device reached CUDA: {event!r}")
    return event.event


def _set_numerics(deterministic: bool, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.use_deterministic_algorithms(deterministic)
    # The fill is useless, since the memory is about to be written; and it runs on a stream that the writer does not
    # wait for.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by the module's class
    if deterministic:  # cuBLAS reads the variable when its handle is created, which is after this
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
