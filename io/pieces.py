"""Pieces of state, and how they become checksummed blobs, several at once, while the state is still being made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain_ray.config import SaveCompression
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.blob_store import BlobStore, BlobWriter
from megatrain_ray.io.manifest import BlobEntry, PartManifest, PieceEntry
from megatrain_ray.io.piece_codec import PieceCodec

CHUNK_BYTES = 1 << 20  # copied, and checksummed while they are in a core's cache
STORED_BYTES = 8 << 20  # under one checksum: a reader with other cuts reads at most two of these in vain per piece
# Stretches on their way at once. 4 of 8 MiB were as fast as a disk of 1.4 GB/s, 8 of 16 MiB a quarter slower. One core
# compresses about 1 GB/s. Memory: 4 × 8 MiB, with compression 8 × 3 × 8 MiB.
WRITES_AT_ONCE: dict[SaveCompression, int] = {"none": 4, "zstd": 8}


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


async def write_blobs(
    store: BlobStore,
    part: int,
    pieces: Iterable[Piece],
    done: Callable[[Piece], None] = lambda piece: None,
    compression: SaveCompression = "none",
) -> PartManifest:
    """Writes one blob a kind, durable on return. Raises MegatrainError, and what `pieces` raises.

    `pieces` may block until there is a next one; it is iterated in worker threads, one call at a time and, after an
    error, no more. A piece's bytes must not change from when it is yielded until `done(piece)` is called.
    """
    try:
        async with AsyncExitStack() as files, asyncio.TaskGroup() as group:
            writer = _PartWriter(store, part, _stretches(pieces), done, compression, files)
            for _ in range(WRITES_AT_ONCE[compression]):
                group.create_task(writer.work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return PartManifest(part, writer.blobs())


@dataclass
class _Source:
    piece: Piece
    itemsize: int
    unread_bytes: int


class _Stretch(NamedTuple):
    """Bytes [first, last) of a piece: what is stored under one checksum."""

    source: _Source
    first: int
    last: int

    def chunks(self) -> Iterator[memoryview]:
        return self.source.piece.chunks(self.first, self.last)

    def entry(self, offset: int, nbytes: int, crc32: int) -> PieceEntry:
        piece, itemsize = self.source.piece, self.source.itemsize
        start, stop = piece.start + self.first // itemsize, piece.start + self.last // itemsize
        return PieceEntry(piece.layer, start, stop, offset, nbytes, crc32)


@dataclass
class _Blob:
    """`turn` is set when the newest stretch has its place, which is after that of the one before."""

    name: str
    writer: BlobWriter
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    nbytes: int = 0
    entries: list[PieceEntry] = field(default_factory=list)


class _Job(NamedTuple):
    stretch: _Stretch
    blob: _Blob
    before: asyncio.Event
    after: asyncio.Event


class _PartWriter:
    """What the workers share. Only their coding and their transfers run at the same time, in threads."""

    def __init__(
        self,
        store: BlobStore,
        part: int,
        stretches: Iterator[_Stretch],
        done: Callable[[Piece], None],
        compression: SaveCompression,
        files: AsyncExitStack,
    ) -> None:
        self._store = store
        self._part = part
        self._stretches = stretches
        self._done = done
        self._compression = compression
        self._files = files
        self._taking = asyncio.Lock()
        self._blobs: dict[str, _Blob] = {}

    async def work(self) -> None:
        """Takes one stretch after the other from its piece into its blob."""
        codec = PieceCodec(STORED_BYTES)
        while job := await self._take():
            source = job.stretch.source
            encoded = await asyncio.to_thread(codec.encode, job.stretch.chunks(), source.itemsize, self._compression)
            source.unread_bytes -= job.stretch.last - job.stretch.first
            if not source.unread_bytes:
                self._done(source.piece)
            await job.before.wait()  # equal states make equal blobs
            offset = job.blob.nbytes
            job.blob.nbytes += len(encoded.block)
            job.blob.entries.append(job.stretch.entry(offset, encoded.nbytes, encoded.crc32))
            job.after.set()
            await job.blob.writer.write_at(offset, encoded.block)

    def blobs(self) -> tuple[BlobEntry, ...]:
        return tuple(
            BlobEntry(blob.name, kind, self._compression, blob.nbytes, tuple(blob.entries))
            for kind, blob in self._blobs.items()
        )

    async def _take(self) -> _Job | None:
        async with self._taking:
            stretch = await asyncio.to_thread(next, self._stretches, None)
            if stretch is None:
                return None
            kind = stretch.source.piece.kind
            blob = self._blobs.get(kind) or await self._open(kind)
            before, blob.turn = blob.turn, asyncio.Event()
            return _Job(stretch, blob, before, blob.turn)

    async def _open(self, kind: str) -> _Blob:
        name = f"part_{self._part}.{kind}"
        blob = self._blobs[kind] = _Blob(name, await self._files.enter_async_context(self._store.create(name)))
        blob.turn.set()
        return blob


def _stretches(pieces: Iterable[Piece]) -> Iterator[_Stretch]:
    for piece in pieces:
        nbytes = sum(len(buffer) for buffer in piece.buffers)
        itemsize = max(1, nbytes // max(1, piece.stop - piece.start))
        piece.check_size(itemsize)
        source = _Source(piece, itemsize, nbytes)
        for first in range(0, nbytes, STORED_BYTES):
            yield _Stretch(source, first, min(first + STORED_BYTES, nbytes))
