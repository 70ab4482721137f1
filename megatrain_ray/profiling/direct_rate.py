"""How fast kvikio moves activations between the disk of spill.path and a GPU: measured in a process of its own, so that
whoever asks makes no context on the GPU."""

from __future__ import annotations

import signal
from pathlib import Path

from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.measure.measure_direct_disk import measure_direct
from megatrain_ray.errors import MegatrainError
from megatrain_ray.machine.subprocess_call import in_own_process

GIVE_UP_S = 120  # for what takes three seconds, and the start of CUDA


def measure_direct_here(folder: Path, num_bytes: int) -> float:
    """Bytes per second, read and written at the same time, both together. Raises MegatrainError where kvikio does not
    move a GPU's memory."""
    return in_own_process("measuring the way from the disk to the GPU", _measure, folder, num_bytes)


def _measure(folder: Path, num_bytes: int) -> float:
    signal.alarm(GIVE_UP_S)  # ends this process, whatever a library or a driver is at
    try:
        device = CudaDevice()
        try:
            return measure_direct(device, folder, num_bytes)
        finally:
            device.close()
    except RuntimeError as error:  # CUDA's
        raise MegatrainError(" ".join(str(error).split())) from error
