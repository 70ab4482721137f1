"""Measures how fast kvikio moves activations between the disk of spill.path and a GPU.

The measurement runs in a process of its own, so that the caller creates no context on the GPU.
"""

from __future__ import annotations

import signal
from pathlib import Path

from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.measure.measure_direct_disk import measure_direct
from megatrain_ray.errors import MegatrainError
from megatrain_ray.machine.subprocess_call import in_own_process

GIVE_UP_S = 120  # limit; the measurement takes three seconds, and CUDA has to start


def measure_direct_here(folder: Path, num_bytes: int) -> float:
    """Return bytes per second, the sum of reading and writing at the same time.

    Raises MegatrainError if kvikio cannot move a GPU's memory.
    """
    return in_own_process("measuring the way from the disk to the GPU", _measure, folder, num_bytes)


def _measure(folder: Path, num_bytes: int) -> float:
    signal.alarm(GIVE_UP_S)  # ends this process even if a library or a driver hangs
    try:
        device = CudaDevice()
        try:
            return measure_direct(device, folder, num_bytes)
        finally:
            device.close()
    except RuntimeError as error:  # raised by CUDA
        raise MegatrainError(" ".join(str(error).split())) from error
