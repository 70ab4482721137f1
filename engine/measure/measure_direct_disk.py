"""Measures how fast blocks move between a disk and device memory without a host buffer of ours in between."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import torch

from megatrain_ray.engine.device.device import Device, host_checksum
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay, held_files
from megatrain_ray.io.storage.disk_rate import measure_mixed
from megatrain_ray.virtual_clock import Op, Stage

MOVE = Op("measure", 0)


def measure_direct(device: Device, folder: Path, num_bytes: int, io: DiskIo = DiskIo.KVIKIO) -> float:
    """Return the rate of `measure_mixed` in bytes per second, with blocks in device memory.

    First writes a page and checks that it is read back unchanged. Raises MegatrainError if it is not, or if the disk
    cannot be written.
    """
    asyncio.run(_try(device, folder, io))
    return measure_mixed(folder, num_bytes, DiskWay(io), lambda content: device.block(_on_device(device, content)))


async def _try(device: Device, folder: Path, io: DiskIo) -> None:
    content = os.urandom(ALIGN_BYTES)
    written, read = _on_device(device, memoryview(content)), _on_device(device, memoryview(bytes(ALIGN_BYTES)))
    with explained("write", folder), tempfile.TemporaryFile(dir=folder) as file:
        os.ftruncate(file.fileno(), ALIGN_BYTES)
        store, name = held_files(io), str(file.fileno())
        async with store.update(name) as blob:
            await blob.write_at(0, device.block(written))
            await blob.read_into(0, device.block(read))
        found = torch.empty(ALIGN_BYTES, dtype=torch.uint8)
        device.copy(Stage.D2H, found, read, MOVE, []).synchronize()
        sums = device.checksum(device.block(read)), host_checksum(memoryview(content))
        if found.numpy().tobytes() != content or sums[0] != sums[1]:
            raise MegatrainError(f"something else came to the device than was written to {store.describe(name)}")


def _on_device(device: Device, content: memoryview) -> torch.Tensor:
    memory = device.allocate(len(content))
    device.copy(Stage.H2D, memory, torch.frombuffer(bytearray(content), dtype=torch.uint8), MOVE, []).synchronize()
    return memory
