"""Reads the pieces of a save, however the writer cut them, and finds damage."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple

from megatrain_ray.errors import DamagedSaveError, MegatrainError
from megatrain_ray.io.files.disk_errors import UnreadableError
from megatrain_ray.io.saves.manifest import BlobEntry, Manifest, PieceEntry
from megatrain_ray.io.saves.piece_codec import PieceCodec, copy_bytes
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.io.storage.blob_store import SaveStore, run_together

READS_AT_ONCE = 6  # memory: this many times the largest stored piece (8 MiB); three times that if compressed


class _StoredPiece(NamedTuple):
    """Locates a stored piece, and names the piece that wants some of it; None: it is only checked."""

    blob: BlobEntry
    entry: PieceEntry
    itemsize: int
    wanted: Piece | None = None

    @property
    def raw_bytes(self) -> int:
        return (self.entry.stop - self.entry.start) * self.itemsize

    def __str__(self) -> str:
        return f"{self.blob.kind} of {self.entry.layer}, elements {self.entry.start} to {self.entry.stop}"


class SaveReader:
    """Reads the state that a manifest describes from a store."""

    def __init__(self, store: SaveStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._stored: dict[tuple[str, str], list[_StoredPiece]] = defaultdict(list)
        for blob in manifest.blobs():
            for entry in blob.pieces:
                stored = _StoredPiece(blob, entry, manifest.itemsize.get(blob.kind, 1))
                self._stored[entry.layer, blob.kind].append(stored)
        for found in self._stored.values():
            found.sort(key=lambda stored: stored.entry.start)
        self._largest = max((stored.raw_bytes for found in self._stored.values() for stored in found), default=0)
        self._codecs: list[PieceCodec] = []  # codecs that are not in use

    async def read(self, wanted: Iterable[Piece]) -> None:
        """Fill the writable buffers of each wanted piece. Only bytes whose checksum is right are copied.

        Raises MegatrainError for what the save does not hold. Raises DamagedSaveError naming blob, layer and kind for
        what is damaged.
        """
        await self._each((stored for piece in wanted for stored in self._pieces_of(piece)), self._read)

    async def problems(self) -> list[str]:
        """Read everything and return what is missing, truncated, or not what was written; empty if all is good."""
        found, cut_off = self._manifest.gaps(), set[str]()
        for blob in self._manifest.blobs():
            try:
                self.check_size(blob)
            except DamagedSaveError as error:
                found.append(str(error))
                cut_off.add(blob.name)

        async def check(stored: _StoredPiece, codec: PieceCodec) -> None:
            try:
                await self._read(stored, codec)
            except DamagedSaveError as error:
                found.append(str(error))

        everything = (stored for pieces in self._stored.values() for stored in pieces)
        await self._each((stored for stored in everything if stored.blob.name not in cut_off), check)
        return found

    def check_size(self, blob: BlobEntry) -> None:
        """Raise DamagedSaveError if a blob is missing or its size differs from when it was written."""
        try:
            size = self._store.size(blob.name)
        except UnreadableError as error:
            raise DamagedSaveError(str(error)) from None
        if size != blob.nbytes:
            raise DamagedSaveError(
                f"{self._store.describe(blob.name)} has another size: expected {blob.nbytes} bytes, got {size}"
            )

    def _pieces_of(self, piece: Piece) -> Iterator[_StoredPiece]:
        """Yield the stored pieces that together hold all of `piece`."""
        itemsize = self._manifest.itemsize.get(piece.kind)
        if itemsize is None:
            raise MegatrainError(f"the save holds no {piece.kind}, only {', '.join(self._manifest.itemsize)}")
        piece.check_size(itemsize)
        position = piece.start
        for stored in self._stored[piece.layer, piece.kind]:
            if stored.entry.start <= position < min(stored.entry.stop, piece.stop):
                position = stored.entry.stop
                yield stored._replace(wanted=piece)
        if position < piece.stop:
            raise MegatrainError(f"the save does not hold element {position} of {piece.kind} of {piece.layer}")

    async def _read(self, stored: _StoredPiece, codec: PieceCodec) -> None:
        blob, entry = stored.blob, stored.entry
        try:
            await self._store.read_into(blob.name, entry.offset, codec.room(entry.nbytes))
            await asyncio.to_thread(_take, stored, codec)
        except UnreadableError as error:
            raise DamagedSaveError(f"{error} ({stored})") from None
        except ValueError as error:
            raise DamagedSaveError(f"{self._store.describe(blob.name)} is damaged: {stored}: {error}") from None

    async def _each(
        self, jobs: Iterable[_StoredPiece], work: Callable[[_StoredPiece, PieceCodec], Awaitable[None]]
    ) -> None:
        """Run `work` for all jobs, READS_AT_ONCE of them at a time so that memory stays bounded."""
        queue = iter(jobs)

        async def worker() -> None:
            codec = None
            for job in queue:
                codec = codec or (self._codecs.pop() if self._codecs else PieceCodec(self._largest))
                await work(job, codec)
            if codec:
                self._codecs.append(codec)

        await run_together(worker() for _ in range(READS_AT_ONCE))


def _take(stored: _StoredPiece, codec: PieceCodec) -> None:
    """Check a piece that was read, then copy what is wanted of it. Raises ValueError if it is damaged."""
    entry, piece, itemsize = stored.entry, stored.wanted, stored.itemsize
    raw, raw_bytes, crc32, _ = codec.decode(entry.nbytes, stored.raw_bytes, itemsize, stored.blob.compression)
    if crc32 != entry.crc32:
        raise ValueError(f"expected checksum {entry.crc32:08x}, got {crc32:08x}")
    if piece is None:
        return
    shift = (entry.start - piece.start) * itemsize  # offset of the stored piece in the wanted one, in bytes
    start, stop = max(0, shift), min((piece.stop - piece.start) * itemsize, shift + raw_bytes)
    for part in piece.chunks(start, stop):
        copy_bytes(raw[start - shift : start - shift + len(part)], part)
        start += len(part)
