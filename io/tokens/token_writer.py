"""Writes token ids to disk: tokens, document lengths and, if there is one, a loss mask, with checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import RecordLocation
from megatrain_ray.io.tokens.token_block import TokenBlock

TOKENS_NAME = "tokens.bin"
LENGTHS_NAME = "lengths.bin"
MASK_NAME = "supervised.bin"
LENGTH_TYPE = np.dtype("<i8")
MASK_TYPE = np.dtype("?")
READ_BYTES = 1 << 20
CHUNK_TOKENS = 1 << 18  # tokens buffered before they are written
EMPTY_TOKENS = 16  # memory of a block in addition to its ids, in tokens

ID_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def id_bytes(num_ids: int) -> int:
    """Return the bytes per id on disk, 2 or 4, for ids less than `num_ids`."""
    return 2 if num_ids <= 1 << 16 else 4


def check_id(highest: int, where: str, vocab_size: int) -> None:
    """Raise ConfigError if the id `highest`, which `where` has, is outside the model's vocabulary."""
    if highest >= vocab_size:
        raise ConfigError(
            f"data.tokenizer: {where} has token id {highest}, but the model's vocab_size is {vocab_size}; "
            f"use the model's own tokenizer, or a model of at least {highest + 1} entries"
        )


class TokenWriter:
    """Writes documents one after the other.

    crc32: checksums for ids of 2 and of 4 bytes, over all tokens, then all lengths, then the mask if there is one.
    highest_id, highest_file: the highest id so far and the file that has it; -1 before the first id.
    """

    def __init__(
        self,
        folder: Path,
        itemsize: int,
        vocab_size: int,
        written: Callable[[RecordLocation], None],
        *,
        masked: bool = False,
    ) -> None:
        """Create the files in `folder`.

        itemsize: bytes of an id on disk, 2 or 4.
        vocab_size: of the model.
        written: is called for each chunk with the location of its last block.
        masked: whether blocks come with `supervised`, which is written as the mask.
        """
        self._files = ExitStack()
        self._tokens, self._lengths, *masks = (
            self._files.enter_context((folder / name).open("w+b"))
            for name in (TOKENS_NAME, LENGTHS_NAME, *([MASK_NAME] if masked else []))
        )
        self._mask = masks[0] if masks else None
        self.itemsize = itemsize
        self._vocab_size = vocab_size
        self._written = written
        self._blocks: list[TokenBlock] = []
        self._num_waiting = 0
        self._length = 0  # tokens written so far of the document that the next chunk continues
        self.num_tokens = self.num_documents = 0
        self.highest_id, self.highest_file = -1, ""
        self.crc32 = dict.fromkeys(ID_TYPES, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, block: TokenBlock) -> None:
        """Add a block of ids; it is written once a chunk is full. Raises OSError, ConfigError as check_id."""
        if block.ids.size and (highest := int(block.ids.max())) > self.highest_id:
            check_id(highest, str(block.location), self._vocab_size)
            self.highest_id, self.highest_file = highest, str(block.location.file)
        self._blocks.append(block)
        self._num_waiting += block.ids.size + EMPTY_TOKENS
        if self._num_waiting >= CHUNK_TOKENS:
            self._write()

    def finish(self) -> None:
        """Flush the buffered blocks and add lengths and mask to the checksums. Raises OSError."""
        if self._blocks:
            self._write()
        for file in filter(None, (self._lengths, self._mask)):
            file.seek(0)
            while data := file.read(READ_BYTES):
                self.crc32 = {itemsize: zlib.crc32(data, crc) for itemsize, crc in self.crc32.items()}

    def _write(self) -> None:
        ids = np.concatenate([block.ids for block in self._blocks])
        for itemsize, crc in self.crc32.items():
            self.crc32[itemsize] = zlib.crc32(ids.astype(ID_TYPES[itemsize]).data, crc)
        self._tokens.write(ids.astype(ID_TYPES[self.itemsize]).data)
        if self._mask:
            masks = [block.supervised for block in self._blocks if block.supervised is not None]
            self._mask.write(np.concatenate(masks).astype(MASK_TYPE).data)
        self.num_tokens += ids.size
        self._write_lengths()
        self._written(self._blocks[-1].location)
        self._blocks, self._num_waiting = [], 0

    def _write_lengths(self) -> None:
        ends = np.flatnonzero([block.ends for block in self._blocks])
        totals = self._length + np.cumsum([block.ids.size for block in self._blocks])
        self._lengths.write(np.diff(totals[ends], prepend=0).astype(LENGTH_TYPE).data)
        self._length = int(totals[-1] - (totals[ends[-1]] if ends.size else 0))
        self.num_documents += ends.size
