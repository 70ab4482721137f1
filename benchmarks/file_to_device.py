"""Measures moving activations between a disk and the device, in three ways.

The ways are host staging buffers moved by threads of ours, host staging buffers moved by kvikio, and device staging
buffers, which kvikio reads and writes itself.

    python benchmarks/file_to_device.py OUT.json [--folder /mnt/nvme --gib 2 --layers 8 --ways direct]
    python benchmarks/file_to_device.py OUT.json --device cpu --gib 0.1

For each way, through the engine's own ActivationFile, the rate is measured at which all layers leave the device, until
they are written, and until they are back. It is measured with an idle device, then while a compute stage multiplies
large matrices. The report says whether all came back bit for bit. Then the rate is measured of reading and writing at
the same time, as plans take it (measure_mixed), and what the process took of device and host memory. A way that does
not work says why.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from megatrain_ray.engine.activations.disk_activations import ActivationFile
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice, device_name
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.measure.measure_direct_disk import measure_direct
from megatrain_ray.engine.plan.activation_windows import Windows
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import DiskSettings
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay, held_files
from megatrain_ray.io.storage.disk_rate import measure_mixed
from megatrain_ray.io.storage.kvikio_store import unusable
from megatrain_ray.io.storage.spill_file import create_spill_file
from megatrain_ray.virtual_clock import Op

MIXED_BYTES = 512 << 20
# Size of the square matrices, and number of products: 11 ms each on an H200. A stream's queue has room for far more.
BUSY_SIZE, NUM_BUSY = 16384, 100


@dataclass(frozen=True)
class FilePlan:
    """Holds the fields of a plan that an ActivationFile reads."""

    disk_activations: tuple[int, ...]
    disk: DiskSettings

    @staticmethod
    def of(activations: tuple[int, ...], windows: Tier) -> Plan:
        number, num_bytes = Windows.of(activations)
        disk = DiskSettings(num_staging_buffers=number, staging_buffer_bytes=num_bytes, staging_tier=windows)
        return cast(Plan, FilePlan(activations, disk))

    def total_bytes(self, tier: Tier) -> int:
        return sum(map(aligned, self.disk_activations))


class Way(NamedTuple):
    io: DiskIo
    windows: Tier


def ways_of(device: Device) -> dict[str, Way]:
    """Return the ways by name. On the CPU device the direct way is POSIX, because its memory is host memory."""
    direct = DiskIo.KVIKIO if device.kind == "cuda" else DiskIo.POSIX
    host = {io.value: Way(io, Tier.HOST) for io in DiskIo}
    return {"direct": Way(direct, Tier.HBM), **host}


def compute(device: Device) -> None:
    """Submit about a second of an H200's work, which is more than moving everything one way takes."""
    a = torch.ones(BUSY_SIZE, BUSY_SIZE, device=device.torch_device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(NUM_BUSY):
        torch.mm(a, a, out=out)


def moved(device: Device, file: ActivationFile, tensors: list[torch.Tensor], *, is_busy: bool) -> dict[str, float]:
    """Offload all tensors and reload them; return GB/s until they have left, are written, and are back.

    The device memory of the tensors is released in between.

    is_busy: the compute stage multiplies matrices meanwhile.
    """
    device.record().synchronize()
    file.begin()
    start_s = time.perf_counter()
    away = [file.send(op_of(i, tensor), [tensor.untyped_storage()]) for i, tensor in enumerate(tensors)]
    if is_busy:
        compute(device)
    for sent in away:
        sent.gone().synchronize()
    seconds = {"out": time.perf_counter() - start_s}
    while any(sent.num_written < len(sent.blocks) for sent in away):
        time.sleep(0.001)
    seconds["written"] = time.perf_counter() - start_s
    for storage in (storage for sent in away for storage in sent.storages):
        storage.resize_(0)
    device.record().synchronize()  # or the reload would wait for submitted work, after which its memory is free
    start_s = time.perf_counter()
    file.expect(away[::-1])
    for sent in away[::-1]:
        sent.fetch()
    if is_busy:
        compute(device)
    for sent in away:
        sent.back().synchronize()
    seconds["read"] = time.perf_counter() - start_s
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return {name: round(num_bytes / value / 1e9, 3) for name, value in seconds.items()}


def op_of(layer: int, tensor: torch.Tensor) -> Op:
    return Op("boundary", layer, num_bytes=tensor.nbytes)


@contextmanager
def opened(device: Device, folder: Path, way: Way, activations: tuple[int, ...]) -> Iterator[ActivationFile]:
    plan = FilePlan.of(activations, way.windows)
    fd = create_spill_file(folder, "file_to_device", plan.total_bytes(Tier.NVME))
    file = ActivationFile(plan, device, held_files(way.io), str(fd))
    try:
        yield file
    finally:
        file.close()
        os.close(fd)


def measured(device: Device, folder: Path, way: Way, options: argparse.Namespace) -> dict[str, Any]:
    size = int(options.gib * 2**30) // options.layers // 8 * 8
    found: dict[str, Any] = {"windows": way.windows.value, "io": way.io.value}
    before = device.memory()
    with device.activate():
        where = device.torch_device
        tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=where) for _ in range(options.layers)]
        copies = [tensor.clone() for tensor in tensors]
        with opened(device, folder, way, (size,) * options.layers) as file:
            found["first_gb_per_s"] = moved(device, file, tensors, is_busy=False)
            found["gb_per_s"] = moved(device, file, tensors, is_busy=False)
            if device.kind == "cuda":
                found["beside_compute_gb_per_s"] = moved(device, file, tensors, is_busy=True)
            found["is_bit_equal"] = all(map(torch.equal, tensors, copies))
    if way.windows is Tier.HBM:
        mixed = measure_direct(device, folder, MIXED_BYTES, way.io)
    else:
        mixed = measure_mixed(folder, MIXED_BYTES, DiskWay(way.io))
    found["mixed_gb_per_s"] = round(mixed / 1e9, 3)
    found["reserved_bytes"] = device.memory().reserved_bytes - before.reserved_bytes
    found["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return found


def tried(device: Device, folder: Path, way: Way, options: argparse.Namespace) -> dict[str, Any]:
    if way.io is DiskIo.KVIKIO and (reason := unusable(folder)):
        return {"problem": reason}
    try:
        return measured(device, folder, way, options)
    except (MegatrainError, RuntimeError) as error:
        return {"problem": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--gib", type=float, default=0.5, help="of all layers together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ways", default="direct,kvikio,posix")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    device: Device = CudaDevice() if options.device == "cuda" else CpuDevice()
    report: dict[str, Any] = {
        "commit": options.commit,
        "torch": torch.__version__,
        "device": device_name() if device.kind == "cuda" else "cpu",
        "gib": options.gib,
        "layers": options.layers,
        "ways": {},
    }
    chosen = options.ways.split(",")
    for name, way in ways_of(device).items():
        if name in chosen:
            start_s = time.perf_counter()
            report["ways"][name] = tried(device, options.folder.absolute(), way, options)
            print(name, f"{time.perf_counter() - start_s:.1f} s", json.dumps(report["ways"][name]), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    device.close()


if __name__ == "__main__":
    main()
