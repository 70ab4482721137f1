"""Simulates a device whose memory a store must treat like a GPU's: there is no memoryview of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import host_checksum
from megatrain_ray.io.storage.blob_store import (
    Blob,
    Block,
)
from tests.support.memory_store import MemoryStore


class ApartMemory:
    """Wraps memory so that it looks like a GPU's: it has `__cuda_array_interface__`, and no buffer protocol.

    content: the memory, which only this module and stand-ins for a GPU's driver may touch.
    """

    def __init__(self, content: memoryview) -> None:
        self.content = content

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (len(self),), "typestr": "|u1", "version": 2}

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, part: slice) -> ApartMemory:
        return ApartMemory(self.content[part])


class ApartDevice(CpuDevice):
    """Simulates a GPU on the CPU: its memory is ApartMemory to a store, and it computes checksums of it itself."""

    def block(self, memory: torch.Tensor) -> Block:
        return ApartMemory(memory.numpy().data)

    def checksum(self, block: Block) -> int:
        assert isinstance(block, ApartMemory)
        return host_checksum(block.content)


class ApartStore(MemoryStore):
    """Keeps blobs in memory, moves ApartMemory to and from them, and counts the bytes moved."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._blobs["spill"] = bytearray(num_bytes)
        self.num_moved = 0

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        async with super().update(name) as blob:
            yield _ApartBlob(self, blob)


class _ApartBlob:
    def __init__(self, store: ApartStore, blob: Blob) -> None:
        self._store = store
        self._blob = blob

    async def write_at(self, offset: int, block: Block) -> None:
        assert isinstance(block, ApartMemory)
        self._store.num_moved += len(block)
        await self._blob.write_at(offset, block.content)

    async def read_into(self, offset: int, block: Block) -> None:
        assert isinstance(block, ApartMemory)
        self._store.num_moved += len(block)
        await self._blob.read_into(offset, block.content)
