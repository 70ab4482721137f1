"""Reads the pieces of a save, whatever the cuts it was written with, and finds damage."""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.blob_store import BlobStore
from megatrain_ray.io.manifest import BlobEntry, Manifest, PieceEntry
from megatrain_ray.io.pieces import CHUNK_BYTES, Piece

READS_AT_ONCE = 4


class _Stored(NamedTuple):
    """A stored piece, where it lies, and the piece that wants some of it (None: nobody, it is only checked)."""

    blob: BlobEntry
    entry: PieceEntry
    wanted: Piece | None = None


class SaveReader:
    """The state that a manifest describes, in a store."""

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._stored: dict[tuple[str, str], list[_Stored]] = defaultdict(list)
        for blob in manifest.blobs():
            for entry in blob.pieces:
                self._stored[entry.layer, blob.kind].append(_Stored(blob, entry))
        for found in self._stored.values():
            found.sort(key=lambda stored: stored.entry.start)

    async def read(self, wanted: Iterable[Piece]) -> None:
        """Fills the writable buffers of each wanted piece.

        Raises MegatrainError naming blob, layer and kind for what the save does not hold or what is damaged; the
        buffers then hold anything.
        """
        await _each((stored for piece in wanted for stored in self._making_up(piece)), self._read)

    async def problems(self) -> list[str]:
        """Reads everything and says what is missing, truncated or not what was written; empty: the save is good."""
        found = self._manifest.gaps()

        async def note(work: Awaitable[None]) -> None:
            try:
                await work
            except MegatrainError as error:
                found.append(str(error))

        for blob in self._manifest.blobs():
            await note(self.check_size(blob))
        everything = [stored for pieces in self._stored.values() for stored in pieces]
        await _each(everything, lambda stored: note(self._read(stored)))
        return found

    async def check_size(self, blob: BlobEntry) -> None:
        """Raises MegatrainError for a blob that is missing or has another size than when it was written."""
        size = await self._store.size(blob.name)
        if size != blob.nbytes:
            raise MegatrainError(
                f"{self._store.describe(blob.name)} has another size: expected {blob.nbytes} bytes, got {size}"
            )

    def _making_up(self, piece: Piece) -> Iterator[_Stored]:
        """The stored pieces that together hold all of `piece`."""
        itemsize = self._manifest.itemsize.get(piece.kind)
        if itemsize is None:
            raise MegatrainError(f"the save holds no {piece.kind}, only {', '.join(self._manifest.itemsize)}")
        piece.check_size(itemsize)
        position = piece.start
        for blob, entry, _ in self._stored[piece.layer, piece.kind]:
            if entry.start <= position < min(entry.stop, piece.stop):
                position = entry.stop
                yield _Stored(blob, entry, piece)
        if position < piece.stop:
            raise MegatrainError(f"the save does not hold element {position} of {piece.kind} of {piece.layer}")

    async def _read(self, stored: _Stored) -> None:
        entry, crc = stored.entry, 0
        scratch = memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
        for first in range(0, entry.nbytes, CHUNK_BYTES):
            chunk = scratch[: entry.nbytes - first]
            await self._store.read_into(stored.blob.name, entry.offset + first, chunk)
            crc = await asyncio.to_thread(_consume, stored, first, chunk, crc)
        if crc != entry.crc32:
            raise MegatrainError(
                f"{self._store.describe(stored.blob.name)} is damaged: {stored.blob.kind} of {entry.layer}, elements "
                f"{entry.start} to {entry.stop}: expected checksum {entry.crc32:08x}, got {crc:08x}"
            )


def _consume(stored: _Stored, first: int, chunk: memoryview, crc: int) -> int:
    """Copies what is wanted of a chunk, `first` bytes into the stored piece; returns the checksum up to here."""
    entry, piece = stored.entry, stored.wanted
    if piece is not None:
        itemsize = entry.nbytes // (entry.stop - entry.start)
        shift = (entry.start - piece.start) * itemsize + first  # of the chunk in the wanted piece, in bytes
        start, stop = max(0, shift), min((piece.stop - piece.start) * itemsize, shift + len(chunk))
        for part in piece.chunks(start, stop):
            part[:] = chunk[start - shift : start - shift + len(part)]
            start += len(part)
    return zlib.crc32(chunk, crc)


async def _each(jobs: Iterable[_Stored], work: Callable[[_Stored], Awaitable[None]]) -> None:
    """A few at once, so that memory stays bounded."""
    queue = iter(jobs)

    async def worker() -> None:
        for job in queue:
            await work(job)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(READS_AT_ONCE):
                group.create_task(worker())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
