"""The process that measures a machine, and prints what it found. Started by profiles.py."""

from __future__ import annotations

import sys

import torch

from megatrain_ray.engine.cpu_device import CpuDevice
from megatrain_ray.engine.cuda_device import CudaDevice, PeerCopies
from megatrain_ray.engine.device import Device
from megatrain_ray.engine.measure_profile import measure, measure_link
from megatrain_ray.engine.precision import Precision
from megatrain_ray.profiles import this_machine


def main() -> None:
    """Prints its profile as JSON. `sys.argv[1]`: cpu or cuda."""
    machine = this_machine(sys.argv[1])
    torch.set_num_threads(machine.num_cpus)

    def make_device(precision: Precision) -> Device:
        if machine.gpu:
            return CudaDevice(tf32=precision is Precision.TF32)
        return CpuDevice(num_threads=machine.num_cpus)

    print(measure(machine, make_device, machine.num_cpus).to_json())


def link() -> None:
    """Prints what a GPU has from another one while it sends as much, in bytes per second."""
    print(measure_link(lambda num_bytes: PeerCopies(num_bytes).run))
