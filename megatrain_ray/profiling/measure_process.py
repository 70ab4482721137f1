"""Measures a machine in a process of its own and prints the result. profiles.py starts the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.cuda_info import PeerCopies
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.measure.measure_profile import measure, measure_link
from megatrain_ray.profiling.profiles import this_machine


def print_profile() -> None:
    """Measure the machine and print its profile as JSON. sys.argv[1] is the device, cpu or cuda."""
    machine = this_machine(sys.argv[1])
    torch.set_num_threads(machine.num_cpus)

    def make_device(precision: Precision) -> Device:
        if machine.gpu:
            return CudaDevice(tf32=precision is Precision.TF32)
        return CpuDevice(num_threads=machine.num_cpus)

    print(measure(machine, make_device, machine.num_cpus).to_json())


def print_link() -> None:
    """Measure the links between neighbouring GPUs and print the slowest rate in bytes per second.

    The rate is what a GPU receives from its neighbour while it sends as much. In a ring all GPUs wait for the slowest
    pair.

    sys.argv[1]: number of GPUs, the first ones in torch's order.
    """
    print(min(measure_link(partial(_exchange, one, other)) for one, other in neighbours(int(sys.argv[1]))))


def neighbours(count: int) -> list[tuple[int, int]]:
    """Return each pair of neighbours once, of a ring of `count` GPUs (two or more)."""
    pairs = [(k, (k + 1) % count) for k in range(count)]
    return pairs if count > 2 else pairs[:1]


def _exchange(one: int, other: int, num_bytes: int) -> Callable[[int], None]:
    return PeerCopies(num_bytes, one, other).run
