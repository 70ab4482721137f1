"""Opens the device of a plan, in the process that computes."""

from __future__ import annotations

import ctypes

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import EXCHANGE, Plan

# When glibc chose itself which allocations to map, its heap kept up to 500 MB of freed tensors of a 0.3B model in bf16.
M_MMAP_THRESHOLD = -3  # of malloc.h
MAPPED_BYTES = 1 << 20


def make_device(plan: Plan, *, deterministic: bool) -> Device:
    """Open the device with the plan's numerics, threads and memory limit. Changes settings of the whole process."""
    if plan.device == "cuda":
        tf32 = plan.precision.compute == "tf32"
        return CudaDevice(deterministic=deterministic, tf32=tf32, memory_bytes=_own_bytes(plan))
    if deterministic:
        torch.use_deterministic_algorithms(True)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    return CpuDevice(num_threads=plan.compute.num_threads)


def _own_bytes(plan: Plan) -> int | None:
    """Return the device memory that torch's allocator may use, which NCCL's is not part of. None: no limit."""
    if plan.limits.hbm_bytes is None:
        return None
    return plan.limits.hbm_bytes - plan.item_bytes(Tier.HBM, EXCHANGE)
