"""Opens the device of a plan, and explains in errors why its memory ran out or that it failed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import CONTEXT, EXCHANGE, Plan
from megatrain_ray.errors import CapacityError, LostDeviceError
from megatrain_ray.units import format_bytes

# When glibc chose itself which allocations to map, its heap kept up to 500 MB of freed tensors of a 0.3B model in bf16.
M_MMAP_THRESHOLD = -3  # of malloc.h
MAPPED_BYTES = 1 << 20


def make_device(plan: Plan, *, deterministic: bool) -> Device:
    """Open the device with the plan's numerics, threads and memory limit. Changes settings of the whole process."""
    if plan.device == "cuda":
        limit = plan.limits.hbm_bytes  # None: no limit
        own = None if limit is None else limit - plan.item_bytes(Tier.HBM, EXCHANGE)  # NCCL allocates the rest itself
        return CudaDevice(
            deterministic=deterministic, tf32=plan.precision.compute == "tf32", memory_bytes=own,
            context_bytes=plan.item_bytes(Tier.HBM, CONTEXT),
        )  # fmt: skip
    if deterministic:
        torch.use_deterministic_algorithms(True)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    return CpuDevice(num_threads=plan.compute.num_threads)


@contextmanager
def memory_explained(plan: Plan, doing: str) -> Iterator[None]:
    """Raise CapacityError if the block runs out of device memory, LostDeviceError if the device fails.

    doing: what the block does, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            if _is_failure(error):
                raise LostDeviceError(f"{doing}: the GPU failed: {_first_sentences(error)}") from error
            raise
        counted, limit = plan.total_bytes(Tier.HBM), plan.limits.hbm_bytes
        of_limit = f" of {format_bytes(limit)}" if limit is not None else ""
        raise CapacityError(
            f"{doing}: out of device memory, of which the plan counts {format_bytes(counted)}{of_limit}; either other "
            "processes hold memory of this GPU (nvidia-smi shows them): set hardware.hbm_limit to what they leave; or "
            "the plan counts too little for this model: lower train.micro_batch_size or data.seq_len. "
            f"{_first_sentences(error)}"
        ) from error


def check_free(plan: Plan, device: Device) -> None:
    """Raise CapacityError if other processes have taken device memory that the plan counts with.

    Call it when the device is open, so that its context is already allocated. The plan may have been made long before.
    """
    free = device.free_bytes()
    context = plan.item_bytes(Tier.HBM, CONTEXT)
    counted = plan.total_bytes(Tier.HBM) - context
    if free is None or counted <= free:
        return
    raise CapacityError(
        f"the plan counts {format_bytes(counted)} of device memory beside the context, and {format_bytes(free)} are "
        "free: other processes hold memory of this GPU (nvidia-smi shows them); end them, or let another plan be made "
        f"for what they leave: hardware.hbm_limit={free + context}"
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    # A context or a library's handle is allocated outside torch's allocator, and has errors of its own.
    others = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in others)


def _is_failure(error: RuntimeError) -> bool:
    """Return whether the device failed, so that its context is of no use any more, whatever the cause."""
    texts = ("CUDA error: ", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED")
    kind = getattr(torch, "AcceleratorError", ())  # torch 2.7 and earlier have no class for it
    return isinstance(error, kind) or any(text in str(error) for text in texts)


def _first_sentences(error: RuntimeError) -> str:
    return str(error).partition(" If reserved")[0].partition("\n")[0]
