"""Pieces of state, and how they become checksummed blobs, a few MiB at a time."""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.blob_store import BlobStore
from megatrain_ray.io.manifest import BlobEntry, PartManifest, PieceEntry

CHUNK_BYTES = 4 << 20
STORED_BYTES = 64 << 20  # under one checksum: a reader with other cuts reads at most two of these in vain per piece


class Piece(NamedTuple):
    """Elements [start, stop) of one kind of a layer, logical; `buffers`: their bytes, laid end to end."""

    layer: str
    kind: str
    start: int
    stop: int
    buffers: Sequence[memoryview]

    def check_size(self, itemsize: int) -> None:
        """Raises MegatrainError unless the buffers hold [start, stop) and no more."""
        nbytes = sum(len(buffer) for buffer in self.buffers)
        if nbytes != (self.stop - self.start) * itemsize or not 0 <= self.start < self.stop:
            raise MegatrainError(
                f"{self.kind} of {self.layer}: elements {self.start} to {self.stop} of {itemsize} bytes do not fill "
                f"buffers of {nbytes} bytes"
            )

    def chunks(self, first: int, last: int) -> Iterator[memoryview]:
        """Bytes [first, last) of the piece, in views of at most CHUNK_BYTES."""
        position = 0
        for buffer in self.buffers:
            stop = min(last - position, len(buffer))
            for start in range(max(0, first - position), stop, CHUNK_BYTES):
                yield buffer[start : min(start + CHUNK_BYTES, stop)]
            position += len(buffer)


async def write_blobs(store: BlobStore, part: int, pieces: Iterable[Piece]) -> PartManifest:
    """Writes one blob a kind, all at the same time. The state must not change meanwhile. Raises MegatrainError."""
    kinds: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        kinds[piece.kind].append(piece)
    try:
        async with asyncio.TaskGroup() as group:
            writes = [group.create_task(_write_blob(store, f"part_{part}.{kind}", kind, kinds[kind])) for kind in kinds]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return PartManifest(part, tuple(write.result() for write in writes))


async def _write_blob(store: BlobStore, name: str, kind: str, pieces: list[Piece]) -> BlobEntry:
    entries: list[PieceEntry] = []
    nbytes = await store.write(name, _stored_chunks(pieces, entries))
    return BlobEntry(name, kind, nbytes, tuple(entries))


def _stored_chunks(pieces: Iterable[Piece], entries: list[PieceEntry]) -> Iterator[memoryview]:
    """The chunks of a blob; appends an entry for each stored piece that went by."""
    offset = 0
    for piece in pieces:
        nbytes = sum(len(buffer) for buffer in piece.buffers)
        itemsize = max(1, nbytes // max(1, piece.stop - piece.start))
        piece.check_size(itemsize)
        for first in range(0, nbytes, STORED_BYTES):
            last, crc = min(first + STORED_BYTES, nbytes), 0
            for chunk in piece.chunks(first, last):
                crc = zlib.crc32(chunk, crc)
                yield chunk
            start, stop = piece.start + first // itemsize, piece.start + last // itemsize
            entries.append(PieceEntry(piece.layer, start, stop, offset, last - first, crc))
            offset += last - first
