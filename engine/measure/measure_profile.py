"""Measures a hardware profile within half a minute, with the engine's Device and the optimizer kernel of the shards.

Products are measured as a step needs them, by a device that is under load for seconds. In its first second a card may
compute faster than its power lets it later on: an H100 multiplied at 730 TFLOPS, and then at 570 to 730, as its clock
went up and down every 0.7 s (rates under load in benchmarks/README.md).
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.device.hardware_profile import HardwareProfile, MachineName, RatePoint
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.model.fp8_products import fp8_problem, multiply_quantised, quantised
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.undo_log import Journal, ParamSlice, Transaction
from megatrain_ray.engine.optimizer.update_kernel import open_kernel
from megatrain_ray.io.arenas.arena_holder import ArenaHolder
from megatrain_ray.virtual_clock import Op, Stage

log = logging.getLogger(__name__)

CALLS = 3  # a measurement times at least so many rounds
ROUNDS = 4  # a measurement's time is divided into about so many rounds; the host waits only at the end of a round
SMALL_BYTES = 4096  # size of a copy that takes only the fixed cost of every copy
ATTENDED = 8192  # tokens of all sequences in one call of attention together
HEADS, HEAD_DIM = 16, 128
EXPERTS, MODEL_DIM, EXPERT_DIM = 32, 2048, 1536  # of a grouped product; rates of other shapes are within 10 % of its
SUSTAINED_WIDTH = 2048  # narrower products take less power than a card has
SHORT_S = 0.02  # long enough for many copies or small products in a row, of which each hides the next one's launch
COPIED_SHARE = 0.15  # of the time under load, as in a layer: between products memory is read and written
COMPUTED = "bf16", "fp32", "tf32"
FP8 = "fp8"  # also measured where the device has such products, which is on GPUs
HYPER = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_DIRECTIONS = (Stage.H2D,), (Stage.D2H,), (Stage.H2D, Stage.D2H)
# Types of working copy, residual, both moments, and gradient.
STATE = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)

MakeDevice = Callable[[Precision], Device]
# Takes bytes; returns a function that exchanges so many, each way between two GPUs, as often as its argument says.
MakeExchange = Callable[[int], Callable[[int], None]]


@dataclass(frozen=True)
class Effort:
    """Says how much is measured. With the defaults an H200 or a small CPU takes a few seconds."""

    budget_s: float = 0.1  # time of each measurement
    warm_s: float = 2.5  # load before the first product
    sustained_s: float = 0.7  # time of each measurement of products in bf16; of others and of attention half of it
    slow_s: float = 0.05  # after a product or an attention that takes longer, no larger one is measured
    elements: int = 1 << 25  # size of the parameter that is updated; its state is larger than caches
    copy_bytes: int = 64 << 20  # size of a copy, about a layer's weights; the full rate is reached from 16 MiB on
    device_bytes: int = 256 << 20
    widths: tuple[int, ...] = (64, 256, 1024, 2048, 4096, 8192, 12288)
    lengths: tuple[int, ...] = (128, 1024, 4096, 16384, 32768)
    rows: tuple[int, ...] = (64, 256, 1024, 4096)  # of an expert, in a grouped product


def measure(
    machine: MachineName, make_device: MakeDevice, num_threads: int, effort: Effort | None = None
) -> HardwareProfile:
    """Measure the profile of this machine. The optimizer has `num_threads`.

    Of devices, which `make_device` makes with the numerics of a precision, only one exists at a time.
    """
    return _Measurement(make_device, num_threads, effort or Effort()).profile(machine)


def measure_link(make_exchange: MakeExchange, effort: Effort | None = None) -> float:
    """Return the bytes per second that two GPUs exchange each way."""
    effort = effort or Effort()
    return effort.copy_bytes / _median_s(make_exchange(effort.copy_bytes), effort.budget_s)


class _Measurement:
    def __init__(self, make_device: MakeDevice, num_threads: int, effort: Effort) -> None:
        self._make_device = make_device
        self._num_threads = num_threads
        self._effort = effort

    def profile(self, machine: MachineName) -> HardwareProfile:
        effort = self._effort
        with self._host_memory() as memory, closing(self._make_device(Precision.BF16)) as device:
            device.pin(memory)
            copies = _Copies(device, memory, effort.copy_bytes)
            h2d_s, d2h_s, both_s = (self._median_s(partial(copies.run, stages)) for stages in _DIRECTIONS)
            count = max(1, int(effort.budget_s / both_s))
            up_s, down_s = (copies.seconds_against_others(stage, count) for stage in (Stage.H2D, Stage.D2H))
            adamw_s, busy_s = self._updates_s(memory, copies, both_s)
            copy_s = self._median_s(lambda count: copies.run((Stage.H2D,), count, SMALL_BYTES))
            with device.activate():
                triad_s, device_s, launch_s = self._triad_s(memory), self._device_s(device), self._launch_s(device)
        matmul = {name: points for name in (*COMPUTED, FP8) if (points := tuple(self._matmul(name)))}
        with closing(self._make_device(Precision.BF16)) as device, device.activate():
            attention, grouped = tuple(self._attention(device)), tuple(self._grouped(device))
        return HardwareProfile(
            version=1,
            machine=machine,
            h2d_bytes_per_s=effort.copy_bytes / h2d_s,
            d2h_bytes_per_s=effort.copy_bytes / d2h_s,
            both_bytes_per_s=effort.copy_bytes / both_s,
            h2d_busy_bytes_per_s=effort.copy_bytes / up_s,
            d2h_busy_bytes_per_s=effort.copy_bytes / down_s,
            copy_s=copy_s,
            triad_bytes_per_s=16 * effort.elements / triad_s,  # FP32: 2 reads, 1 write, and a read of the written line
            adamw_per_s=effort.elements / adamw_s,
            adamw_busy_per_s=effort.elements / busy_s,
            device_bytes_per_s=2 * effort.device_bytes / device_s,
            launch_s=launch_s,
            matmul=matmul,
            attention=attention,
            grouped=grouped or None,
        )

    def _median_s(self, work: Callable[[int], object]) -> float:
        return _median_s(work, self._effort.budget_s)

    @contextmanager
    def _host_memory(self) -> Iterator[torch.Tensor]:
        """Allocate shared memory as working copies and state use it, for the block: 1-D uint8, pages present."""
        num_bytes = self._effort.elements * sum(dtype.itemsize for dtype in STATE)
        with closing(ArenaHolder.create({"profile": num_bytes})) as holder:
            arena = holder.map("profile")
            arena.populate(self._num_threads)
            yield torch.frombuffer(arena.buffer, dtype=torch.uint8)[:num_bytes]

    def _views(self, memory: torch.Tensor, dtypes: Sequence[torch.dtype]) -> Iterator[torch.Tensor]:
        """Yield a view of `memory` for each type, one after the other, with `effort.elements` zeros each."""
        start = 0
        for dtype in dtypes:
            stop = start + self._effort.elements * dtype.itemsize
            yield memory[start:stop].view(dtype).zero_()
            start = stop

    def _updates_s(self, memory: torch.Tensor, copies: _Copies, both_s: float) -> tuple[float, float]:
        """Return the seconds of an update by itself, and of one while copies run in both directions (`both_s` each)."""
        *state, gradient = self._views(memory, STATE)
        layer = FlatLayout.build("profile", [ParameterSpec("w", "w", (self._effort.elements,))])
        shard = ShardLayout(ModelLayout((layer,), ("w",)), 0, 1)
        room = memoryview(bytearray(Journal.num_bytes(shard, Precision.BF16, self._num_threads)))
        journal = Journal(room, shard, Precision.BF16, self._num_threads)
        parts = [ParamSlice(AdamState(*state), 0, ParamWeighting(1.0, HYPER.weight_decay), 0)]
        serials = itertools.count(1)
        with closing(open_kernel(self._num_threads, HYPER)) as kernel:

            def update(count: int) -> None:
                params = UpdateParams(10, 10, 1e-4, 0.3)
                for _ in range(count):
                    kernel.update(parts, gradient, params, Transaction(journal, next(serials)))

            alone_s = self._median_s(update)
            with copies.running(2 + int(2 * alone_s / both_s)):  # enough copies to outlast the update
                busy_s = _seconds(partial(update, 1))
        return alone_s, max(alone_s, busy_s)

    def _triad_s(self, memory: torch.Tensor) -> float:
        a, b, c = self._views(memory, (torch.float32,) * 3)
        return self._median_s(_repeated(partial(torch.add, b, c, alpha=3.0, out=a)))

    def _device_s(self, device: Device) -> float:
        """Return the seconds of a copy within device memory."""
        source, target = (device.allocate(self._effort.device_bytes).zero_() for _ in range(2))
        return self._median_s(_repeated(partial(target.copy_, source), device))

    def _launch_s(self, device: Device) -> float:
        """Return the seconds per operator in a row of many small ones."""
        value = torch.zeros(16, device=device.torch_device)
        return self._median_s(_repeated(partial(value.add_, 1.0), device))

    def _matmul(self, name: str) -> Iterator[RatePoint]:
        """Yield the rates of products of square matrices of growing width, until one is slow.

        name: precision, or FP8. Yields nothing for FP8 on the CPU device, and where torch or the GPU has no FP8.
        """
        effort, is_first = self._effort, name == COMPUTED[0]
        precision = Precision.BF16 if name == FP8 else Precision(name)
        with closing(self._make_device(precision)) as device, device.activate():
            if name == FP8 and (device.kind == "cpu" or fp8_problem(device.torch_device)):
                return
            traffic = _Traffic(device, effort.device_bytes)
            if is_first and device.torch_device.type == "cuda":  # on a CPU one such product may take minutes
                traffic.seconds_among_copies(_product(effort.widths[-1], name, device), effort.warm_s)
            for width in effort.widths:
                product = _product(width, name, device)
                if width < SUSTAINED_WIDTH:
                    seconds = self._median_s(_repeated(product, device))
                else:
                    seconds = traffic.seconds_among_copies(product, effort.sustained_s / (1 if is_first else 2))
                yield RatePoint(2.0 * width**3, 2.0 * width**3 / seconds)
                if seconds > effort.slow_s:
                    return

    def _attention(self, device: Device) -> Iterator[RatePoint]:
        """Yield the rates of causal attention in bf16, forward and backward, of growing length, until one is slow."""
        for length in self._effort.lengths:
            batch = max(1, ATTENDED // length)
            shape = batch, HEADS, length, HEAD_DIM
            query = torch.randn(shape, dtype=torch.bfloat16, device=device.torch_device, requires_grad=True)
            seconds = _median_s(_repeated(partial(_attend, query), device), self._effort.sustained_s / 2)
            yield RatePoint(float(length), 6.0 * HEADS * HEAD_DIM * batch * length**2 / seconds)
            if seconds > self._effort.slow_s:
                return

    def _grouped(self, device: Device) -> Iterator[RatePoint]:
        """Yield the rates of grouped products in bf16, forward and backward, by the rows of each expert.

        Yields nothing on the CPU device, and where torch or the GPU has no grouped products.
        """
        if device.kind == "cpu":
            return
        make = partial(torch.randn, dtype=torch.bfloat16, device=device.torch_device)
        weights = make(EXPERTS, MODEL_DIM, EXPERT_DIM).requires_grad_()
        for rows in self._effort.rows:
            tokens, gradient = make(EXPERTS * rows, MODEL_DIM).requires_grad_(), make(EXPERTS * rows, EXPERT_DIM)
            ends = rows * torch.arange(1, EXPERTS + 1, device=device.torch_device, dtype=torch.int32)
            work = partial(_multiply_grouped, tokens, weights, ends, gradient)
            try:
                seconds = _median_s(_repeated(work, device), self._effort.sustained_s / 2)
            except (AttributeError, RuntimeError) as error:
                log.info("grouped products are not measured: %s", error)
                return
            yield RatePoint(float(rows), 6.0 * EXPERTS * rows * MODEL_DIM * EXPERT_DIM / seconds)


class _Traffic:
    """Keeps device memory busy between products, as the other operations of a layer do."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        source, target = (device.allocate(num_bytes).zero_() for _ in range(2))
        self._copy = partial(target.copy_, source)
        self._copy_s = _median_s(_repeated(self._copy, device), SHORT_S)

    def seconds_among_copies(self, product: Callable[[], object], budget_s: float) -> float:
        """Return the mean seconds of the product in a mixture with copies, over `budget_s` seconds."""
        once_s = _median_s(_repeated(product, self._device), SHORT_S)
        count = max(1, round((1 / COPIED_SHARE - 1) * self._copy_s / once_s))

        def mixture() -> None:
            for _ in range(count):
                product()
            self._copy()

        mixed_s = statistics.fmean(_times(_repeated(mixture, self._device), budget_s))
        return max(mixed_s - self._copy_s, mixed_s / 2) / count


class _Copies:
    """Copies between device memory and host memory: h2d from the beginning of `memory`, d2h to its end."""

    def __init__(self, device: Device, memory: torch.Tensor, num_bytes: int) -> None:
        self._device = device
        ends = {Stage.H2D: memory[:num_bytes], Stage.D2H: memory[-num_bytes:]}
        self._pairs = {stage: (device.allocate(num_bytes), host) for stage, host in ends.items()}

    def _submit(self, stage: Stage, num_bytes: int | None = None) -> Event:
        on_device, host = (end[:num_bytes] for end in self._pairs[stage])
        target, source = (on_device, host) if stage is Stage.H2D else (host, on_device)
        return self._device.copy(stage, target, source, Op("measure", 0, num_bytes=target.nbytes), ())

    def run(self, stages: Sequence[Stage], count: int, num_bytes: int | None = None) -> None:
        for event in [self._submit(stage, num_bytes) for _ in range(count) for stage in stages]:
            event.synchronize()

    def seconds_against_others(self, stage: Stage, count: int) -> float:
        """Return the seconds of one of `count` copies of a stage while the other direction is busy."""
        other = Stage.D2H if stage is Stage.H2D else Stage.H2D
        beside = [self._submit(other) for _ in range(4 * count)]  # enough to outlast these copies
        seconds = _seconds(lambda: [self._submit(stage) for _ in range(count)][-1].synchronize()) / count
        for event in beside:
            event.synchronize()
        return seconds

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Submit `count` copies each way before the block, and wait for them after it."""
        events = [self._submit(stage) for _ in range(count) for stage in (Stage.H2D, Stage.D2H)]
        yield
        for event in events:
            event.synchronize()


def _median_s(work: Callable[[int], object], budget_s: float) -> float:
    """Return the median seconds of `work`, which does it as often as its argument says, then waits for all of it."""
    return statistics.median(_times(work, budget_s))


def _times(work: Callable[[int], object], budget_s: float) -> list[float]:
    """Return the seconds of `work` in each of several rounds, which take `budget_s` seconds together.

    The first call allocates memory, and does not count. The second one determines how often a round repeats the work,
    so that waiting at its end costs little.
    """
    for count in (1, 1):
        once_s = _seconds(partial(work, count))
    count = max(1, int(budget_s / ROUNDS / once_s))
    times: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times) < CALLS or time.perf_counter() < end_s:
        times.append(_seconds(partial(work, count)) / count)
    return times


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _repeated(work: Callable[[], object], device: Device | None = None) -> Callable[[int], None]:
    """Return a function that does the work as often as its argument says, then waits for the device, if any."""

    def run(count: int) -> None:
        for _ in range(count):
            work()
        if device is not None:
            device.record().synchronize()

    return run


def _attend(query: torch.Tensor) -> None:
    made = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.autograd.grad(made, query, torch.ones_like(made))


def _product(width: int, name: str, device: Device) -> Callable[[], object]:
    # Not zeros: a GPU multiplies those at a higher clock than other numbers.
    dtype = torch.bfloat16 if name == FP8 else Precision(name).working_dtype
    a = torch.randn(width, width, dtype=dtype, device=device.torch_device)
    if name == FP8:
        return partial(multiply_quantised, quantised(a), quantised(a))
    return partial(torch.mm, a, a)


def _multiply_grouped(tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor) -> None:
    made = torch._grouped_mm(tokens, weights, offs=ends)
    torch.autograd.grad(made, (tokens, weights), gradient)
