"""Simulates memory that a store must treat like a GPU's: there is no memoryview of it."""

from __future__ import annotations

from typing import Any


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
