"""Reads ranges of a tensor from where its bytes lie in a safetensors file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatrain_ray.errors import ConfigError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Types that a buffer may have, and what else a folder holds, by safetensors' names.
BUFFER_DTYPES = DTYPES | {
    "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}  # fmt: skip


class StoredTensor(Protocol):
    """Gives the values of a tensor of a folder: `TensorLocation`, or one that is computed from several of these."""

    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> str:
        """Return the type of the values, as safetensors writes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def fill(self, values: torch.Tensor, start: int) -> None:
        """Fill `values`, 1-D and of the tensor's type, with elements from `start` on. Raises ConfigError."""


@dataclass(frozen=True)
class TensorLocation:
    """Locates a tensor: its bytes start at `offset` of a file."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fill(self, values: torch.Tensor, start: int, *, is_read_again: bool = False) -> None:
        """Fill `values` with the tensor's elements from `start` on, and drop the bytes read from the page cache.

        is_read_again: leave them in the page cache.

        In the page cache a model of any size would take memory from its own training state. This reads 2.4 GB/s. With
        O_DIRECT, which does not read ahead, it was 1.5 GB/s, and 0.6 to 1.6 GB/s when filling the cache.
        """
        buffer = values.view(torch.uint8).numpy().data
        first = position = self.offset + start * values.itemsize
        try:
            with self.file.open("rb") as file:
                while buffer and (got := os.preadv(file.fileno(), [buffer], position)):
                    buffer, position = buffer[got:], position + got
                if not is_read_again:
                    os.posix_fadvise(file.fileno(), first, position - first, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ConfigError(f"cannot read {self.file}: {error.strerror}") from None
        if buffer:
            raise ConfigError(f"{self.file} became shorter while it was read: {len(buffer)} bytes are missing")
