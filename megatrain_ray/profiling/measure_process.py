"""Measures a machine in a process of its own and prints the result. profiles.py starts the process."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.cuda_info import PeerCopies, reserved_bytes
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.measure.measure_profile import measure, measure_link
from megatrain_ray.machine.process_memory import device_memory
from megatrain_ray.profiling.profiles import this_machine


def print_profile() -> None:
    """Measure the machine and print its profile as JSON. sys.argv[1] is the device, cpu or cuda."""
    machine = this_machine(sys.argv[1])
    torch.set_num_threads(machine.num_cpus)

    def make_device(precision: Precision) -> Device:
        if machine.gpu:
            return CudaDevice(tf32=precision is Precision.TF32)
        return CpuDevice(num_threads=machine.num_cpus)

    profile = measure(machine, make_device, machine.num_cpus)
    print(replace(profile, context_bytes=_context_bytes() if machine.gpu else None).to_json())


def _context_bytes() -> int | None:
    """Return the GPU memory that this process holds outside of torch's allocator; None where NVML cannot tell."""
    held = device_memory(os.getpid()).num_bytes
    return None if held is None else max(0, held - reserved_bytes())


def print_link() -> None:
    """Measure the links between neighbouring GPUs and print the slowest rate in bytes per second.

    The rate is what a GPU receives from its neighbour while it sends as much. In a ring all GPUs wait for the slowest
    pair.

    sys.argv[1]: number of GPUs, the first ones in torch's order.
    """
    count = int(sys.argv[1])
    num_pairs = count if count > 2 else 1  # two GPUs are one pair of neighbours, not two
    print(min(_link_rate(k, (k + 1) % count) for k in range(num_pairs)))


def _link_rate(one: int, other: int) -> float:
    return measure_link(lambda num_bytes: PeerCopies(num_bytes, one, other).run)
