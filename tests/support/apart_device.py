"""A CPU device whose memory is, to a store, memory of a GPU: nobody who wants a memoryview gets at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from megatrain_ray.engine.device.block_checksum import host_checksum
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.io.storage.blob_store import Blob, Block, MemoryStore


class ApartMemory:
    """`content`: what only this module and a GPU's driver know of."""

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
    """Sums of its own memory are its own."""

    def block(self, memory: torch.Tensor) -> Block:
        return ApartMemory(memory.numpy().data)

    def checksum(self, block: Block) -> int:
        assert isinstance(block, ApartMemory)
        return host_checksum(block.content)


class ApartStore(MemoryStore):
    """Blobs in memory, which such memory goes to and comes from. Keeps how much of it did."""

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
