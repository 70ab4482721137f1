"""The CUDA device: three streams. The only file that touches `torch.cuda`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.engine.device import Device, Event, MemoryStatistics
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.trace import Stage, Timeline

# cudaHostRegister takes pieces of at most this size: larger single ranges failed on some drivers.
REGISTER_BYTES = 32 << 30


class CudaEvent:
    """A CUDA event; `blocking` makes a host wait sleep instead of spin."""

    def __init__(self, stream: torch.cuda.Stream, at_s: float) -> None:
        self.at_s = at_s
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def synchronize(self, timeout_s: float = DEADLINE_S) -> None:
        self.event.synchronize()


class CudaDevice(Device):
    kind = "cuda"

    def __init__(self, timeline: Timeline | None = None, *, deterministic: bool = False, tf32: bool = False) -> None:
        super().__init__(timeline)
        if not torch.cuda.is_available():
            raise ConfigError("hardware.device is cuda, but torch sees no GPU here; set hardware.device: cpu, or auto")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._deterministic = deterministic
        self._streams = {stage: torch.cuda.Stream() for stage in (Stage.COMPUTE, Stage.H2D, Stage.D2H)}
        self._pinned: list[int] = []
        self._waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        _set_numerics(deterministic, tf32)

    def _copy(
        self, stage: Stage, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event], end_s: float
    ) -> Event:
        stream = self._streams[stage]
        with torch.cuda.stream(stream), torch.no_grad():
            for earlier in after:
                stream.wait_event(_cuda(earlier))
            # `.data` has a version counter of its own. All slots are views of one allocation and share another: a copy
            # into one must not look to autograd, at work on another, like a write to its weights.
            for part in self._registered_parts(source if source.device.type == "cpu" else target):
                target.data[part].copy_(source[part], non_blocking=True)
        return CudaEvent(stream, end_s)

    def _wait(self, event: Event, cause: str) -> None:
        stream = self._streams[Stage.COMPUTE]
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(_cuda(event))
        behind.record(stream)
        self._waits.append((cause, before, behind))

    def take_exposed(self) -> dict[str, float]:
        """Waits of the host and of the compute stream; the stream must have come to its end."""
        for cause, before, behind in self._waits:
            behind.synchronize()
            self.add_exposed(cause, before.elapsed_time(behind) / 1000)
        self._waits.clear()
        return super().take_exposed()

    def record(self) -> Event:
        return CudaEvent(self._streams[Stage.COMPUTE], self.timeline.now(Stage.COMPUTE))

    @contextmanager
    def activate(self) -> Iterator[None]:
        with ExitStack() as stack:
            torch.cuda.set_device(self.torch_device)
            stack.enter_context(torch.cuda.stream(self._streams[Stage.COMPUTE]))
            stack.enter_context(sdpa_kernel(self._attention_backends(), set_priority=True))
            yield

    def _attention_backends(self) -> list[SDPBackend]:
        """cuDNN first: 1.8 times flash attention's rate on Hopper. Its backward is not deterministic.

        A compiled layer has what was chosen while it was traced, and tracing happens in a rehearsal, which runs on the
        compute thread (Engine.on_compute_thread) within `activate`.
        """
        if self._deterministic:
            return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        return [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

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
        """A 1-D host tensor, cut where registered ranges meet: CUDA refuses a copy that crosses two of them."""
        cuts = sorted((a - host.data_ptr()) // host.itemsize for a in self._pinned)
        inside = [cut for cut in cuts if 0 < cut < host.numel()]
        return [slice(a, b) for a, b in itertools.pairwise([0, *inside, host.numel()])]

    def memory(self) -> MemoryStatistics:
        return MemoryStatistics(self._reserved_bytes, torch.cuda.max_memory_allocated())

    def close(self) -> None:
        torch.cuda.synchronize()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()


def total_memory_bytes() -> int | None:
    """Memory of the GPU that this process would use; None without one. Makes no context on it."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def device_name() -> str:
    """Of that GPU, as its maker calls it."""
    return str(torch.cuda.get_device_name(0))


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cuda(event: Event) -> torch.cuda.Event:
    if not isinstance(event, CudaEvent):
        raise TypeError(f"an event of another device reached CUDA: {event!r}")
    return event.event


def _set_numerics(deterministic: bool, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.use_deterministic_algorithms(deterministic)
    # Fills what is about to be written anyway, and on a stream that the one which writes does not wait for.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by the module's class
    if deterministic:  # read by cuBLAS when its handle is made, which is after this
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
