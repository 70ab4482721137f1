"""Lists the devices that are here, for tests of all of them."""

from __future__ import annotations

from collections.abc import Callable

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.cuda_info import num_gpus
from megatrain_ray.engine.device.device import Device
from megatrain_ray.virtual_clock import Timeline

Make = Callable[[Timeline, int], Device]  # arguments: the timeline, and the number of threads


def make_cuda(timeline: Timeline, num_threads: int) -> Device:
    return CudaDevice(timeline, deterministic=True)


MAKERS: dict[str, Make] = {"cpu": CpuDevice} | ({"cuda": make_cuda} if num_gpus() else {})
