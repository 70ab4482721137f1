"""Writes pieces of state into checksummed blobs, several at once, while other state is still being computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.saves.manifest import BlobEntry, PartManifest, PieceEntry
from megatrain_ray.io.saves.piece_codec import PieceCodec
from megatrain_ray.io.storage.blob_store import BlobWriter, SaveStore, run_together
from megatrain_ray.spans import Row, SpanLog

CHUNK_BYTES = 1 << 20  # copied and checksummed at a time, while in a core's cache
STORED_BYTES = 8 << 20  # under one checksum; a reader with other cuts reads at most two of these in vain per piece
# Parts in flight at once. 4 of 8 MiB kept up with a disk of 1.4 GB/s; 8 of 16 MiB were a quarter slower. One core
# compresses about 1 GB/s. Memory: 4 × 8 MiB; with compression 8 × 3 × 8 MiB.
WRITES_AT_ONCE: dict[SaveCompression, int] = {"none": 4, "zstd": 8}


INTEGER_KINDS = ("residual",)  # all other kinds of state are floats


class NonFiniteStateError(MegatrainError):
    """Reports that state to be saved holds an infinity or a NaN: training cannot go on from it."""


class Buffer(Protocol):
    """Holds bytes that can be sliced. It becomes a memoryview before it is written or read."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


class Piece(NamedTuple):
    """Holds elements [start, stop) of one kind of a layer, in logical positions: `buffers`, laid end to end."""

    layer: str
    kind: str
    start: int
    stop: int
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    @property
    def itemsize(self) -> int:
        return max(1, self.nbytes // max(1, self.stop - self.start))

    def check_size(self, itemsize: int) -> None:
        """Raise MegatrainError unless the buffers hold exactly [start, stop)."""
        if self.nbytes != (self.stop - self.start) * itemsize or not 0 <= self.start < self.stop:
            raise MegatrainError(
                f"{self.kind} of {self.layer}: elements {self.start} to {self.stop} of {itemsize} bytes do not fill "
                f"buffers of {self.nbytes} bytes"
            )

    def cut(self, nbytes: int) -> Iterator[Piece]:
        """Yield the piece as pieces of `nbytes`, a whole number of elements, and a rest. They share the buffers."""
        for first in range(0, self.nbytes, nbytes):
            last = min(first + nbytes, self.nbytes)
            start, stop = (self.start + byte // self.itemsize for byte in (first, last))
            yield Piece(self.layer, self.kind, start, stop, list(self._views(first, last)))

    def part(self, start: int, stop: int, layer: str, at: int) -> Piece:
        """Return elements [start, stop) of it as elements of another layer, from `at` on. They share the buffers."""
        first, last = ((element - self.start) * self.itemsize for element in (start, stop))
        return Piece(layer, self.kind, at, at + stop - start, list(self._views(first, last)))

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[memoryview]:
        """Yield bytes [first, last) of the piece, or all, in views of at most CHUNK_BYTES."""
        for view in self._views(first, self.nbytes if last is None else last):
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]

    def _views(self, first: int, last: int) -> Iterator[Any]:
        position = 0
        for buffer in self.buffers:
            start, stop = max(0, first - position), min(last - position, len(buffer))
            if start < stop:
                yield buffer[start:stop]
            position += len(buffer)


async def write_blobs(
    store: SaveStore, part: int, pieces: Iterable[Piece], done: Callable[[Piece], None] = lambda part: None,
    compression: SaveCompression = "none", spans: SpanLog | None = None,
) -> PartManifest:  # fmt: skip
    """Write one blob for each kind of state. They are durable on return.

    Raises NonFiniteStateError, MegatrainError, and what `pieces` raises.

    part: number of the part, for the blobs' names.
    pieces: may block until there is a next one. It is iterated in worker threads, one call at a time; after an error it
        is not called again. The bytes of a piece must not change from when it is yielded until `done` was called for
        all of it.
    done: called with parts of a piece, of at most STORED_BYTES each, in any order.
    spans: receives spans of what takes time, while it is on.
    """
    async with AsyncExitStack() as files:
        writer = _PartWriter(store, part, _parts(pieces), done, compression, files, spans or SpanLog())
        await run_together(writer.work() for _ in range(WRITES_AT_ONCE[compression]))
    return PartManifest(part, writer.blobs())


@dataclass
class _OpenBlob:
    """Tracks a blob that is being written.

    turn: set when the newest part has its offset, which follows that of the part before.
    """

    name: str
    writer: BlobWriter
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    nbytes: int = 0
    entries: list[PieceEntry] = field(default_factory=list)


@dataclass
class _PartWriter:
    """Holds what the workers share. Only their encoding and their transfers run concurrently, in threads."""

    store: SaveStore
    part: int
    pieces: Iterator[Piece]  # each to be stored under one checksum
    done: Callable[[Piece], None]
    compression: SaveCompression
    files: AsyncExitStack
    spans: SpanLog
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _blobs: dict[str, _OpenBlob] = field(default_factory=dict)

    async def work(self) -> None:
        """Encode one part after the other and write it to its blob, until there are no more."""
        codec = PieceCodec(STORED_BYTES)
        while True:
            async with self._taking:
                part = await asyncio.to_thread(next, self.pieces, None)
                if part is None:
                    return
                blob = self._blobs.get(part.kind) or await self._open(part.kind)
                before, after = blob.turn, asyncio.Event()
                blob.turn = after
            with self.spans.span(Row.SAVE, f"read {part.kind}", part.layer, num_bytes=part.nbytes):
                encoded = await asyncio.to_thread(codec.encode, part.chunks(), part.itemsize, self.compression)
            if not encoded.finite and part.kind not in INTEGER_KINDS:
                raise NonFiniteStateError(f"{part.kind} of {part.layer} holds a value that is not finite")
            self.done(part)
            await before.wait()  # parts lie in a blob in the order in which they were taken
            offset = blob.nbytes
            blob.nbytes += len(encoded.block)
            entry = PieceEntry(part.layer, part.start, part.stop, offset, encoded.nbytes, encoded.crc32)
            blob.entries.append(entry)
            after.set()
            with self.spans.span(Row.SAVE, f"write {part.kind}", part.layer, num_bytes=len(encoded.block)):
                await blob.writer.write_at(offset, encoded.block)

    def blobs(self) -> tuple[BlobEntry, ...]:
        return tuple(
            BlobEntry(blob.name, kind, self.compression, blob.nbytes, tuple(blob.entries))
            for kind, blob in self._blobs.items()
        )

    async def _open(self, kind: str) -> _OpenBlob:
        name = f"part_{self.part}.{kind}"
        blob = self._blobs[kind] = _OpenBlob(name, await self.files.enter_async_context(self.store.create(name)))
        blob.turn.set()
        return blob


def _parts(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces cut into parts that are stored under one checksum each."""
    for piece in pieces:
        piece.check_size(piece.itemsize)
        yield from piece.cut(STORED_BYTES)
