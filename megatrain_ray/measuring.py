"""The process that measures a machine: prints its profile as JSON. Started by profiles.py."""

from __future__ import annotations

import sys

import torch

from megatrain_ray.engine.cpu_device import CpuDevice
from megatrain_ray.engine.cuda_device import CudaDevice, PeerCopies, num_gpus
from megatrain_ray.engine.device import Device
from megatrain_ray.engine.measure_profile import measure
from megatrain_ray.engine.precision import Precision
from megatrain_ray.profiles import this_machine


def main() -> None:
    """`sys.argv[1]`: cpu or cuda."""
    machine = this_machine(sys.argv[1])
    torch.set_num_threads(machine.num_cpus)

    def make_device(precision: Precision) -> Device:
        if machine.gpu:
            return CudaDevice(tf32=precision is Precision.TF32)
        return CpuDevice(num_threads=machine.num_cpus)

    has_peer = bool(machine.gpu) and num_gpus() > 1
    make_exchange = (lambda num_bytes: PeerCopies(num_bytes).run) if has_peer else None
    print(measure(machine, make_device, machine.num_cpus, make_exchange=make_exchange).to_json())
