"""Measures a hardware profile within half a minute, with the engine's Device and the optimizer kernel of the shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.device.hardware_profile import HardwareProfile, MachineName
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.measure.compute_rates import (
    COMPUTED,
    FP8,
    MakeDevice,
    attention_rates,
    grouped_rates,
    matmul_rates,
)
from megatrain_ray.engine.measure.timing import Effort, median_s, repeated, seconds_of
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.undo_log import Journal, ParamSlice, Transaction
from megatrain_ray.engine.optimizer.update_kernel import open_kernel
from megatrain_ray.io.arenas.arena_holder import ArenaHolder
from megatrain_ray.virtual_clock import Op, Stage

SMALL_BYTES = 4096  # size of a copy that takes only the fixed cost of every copy
HYPER = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_DIRECTIONS = (Stage.H2D,), (Stage.D2H,), (Stage.H2D, Stage.D2H)
# Types of working copy, residual, both moments, and gradient.
STATE = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)

# Takes bytes; returns a function that exchanges so many, each way between two GPUs, as often as its argument says.
MakeExchange = Callable[[int], Callable[[int], None]]


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
    return effort.copy_bytes / median_s(make_exchange(effort.copy_bytes), effort.budget_s)


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
        matmul = {
            name: points
            for name in (*COMPUTED, FP8)
            if (points := tuple(matmul_rates(self._make_device, name, effort)))
        }
        with closing(self._make_device(Precision.BF16)) as device, device.activate():
            attention, grouped = tuple(attention_rates(device, effort)), tuple(grouped_rates(device, effort))
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
            matmul={name: points for name, points in matmul.items() if points},
            attention=attention,
            grouped=grouped or None,
        )

    def _median_s(self, work: Callable[[int], object]) -> float:
        return median_s(work, self._effort.budget_s)

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

            budget_s = self._effort.sustained_s / 2
            alone_s = median_s(update, budget_s)
            count = max(1, int(budget_s / alone_s))
            with copies.running(2 + int(2 * count * alone_s / both_s)):  # enough copies to outlast the updates
                busy_s = seconds_of(partial(update, count)) / count
        return alone_s, max(alone_s, busy_s)

    def _triad_s(self, memory: torch.Tensor) -> float:
        a, b, c = self._views(memory, (torch.float32,) * 3)
        return self._median_s(repeated(partial(torch.add, b, c, alpha=3.0, out=a)))

    def _device_s(self, device: Device) -> float:
        """Return the seconds of a copy within device memory."""
        source, target = (device.allocate(self._effort.device_bytes).zero_() for _ in range(2))
        return self._median_s(repeated(partial(target.copy_, source), device))

    def _launch_s(self, device: Device) -> float:
        """Return the seconds per operator in a row of many small ones."""
        value = torch.zeros(16, device=device.torch_device)
        return self._median_s(repeated(partial(value.add_, 1.0), device))


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
        others = [self._submit(other) for _ in range(4 * count)]  # enough to outlast these copies
        seconds = seconds_of(lambda: [self._submit(stage) for _ in range(count)][-1].synchronize()) / count
        for event in others:
            event.synchronize()
        return seconds

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Submit `count` copies each way before the block, and wait for them after it."""
        events = [self._submit(stage) for _ in range(count) for stage in (Stage.H2D, Stage.D2H)]
        yield
        for event in events:
            event.synchronize()
