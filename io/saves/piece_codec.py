"""Encodes stored pieces for a blob and decodes them: copies, checksums, and compresses by byte planes.

A byte plane holds the bytes of the same position in all numbers, for example signs and exponents, or the lowest bits of
mantissas. Such bytes resemble each other more than neighbours in memory do. bf16 weights shrink by 1.46 with their
planes split, and by 1.28 without.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import zstandard

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.io.storage.blob_store import aligned, aligned_block
from megatrain_ray.io.storage.packed_store import decompress

ZSTD_LEVEL = 1

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Encoded(NamedTuple):
    """Holds an encoded or decoded piece.

    block: aligned; `nbytes` of the piece, then zeros.
    crc32: checksum of its raw bytes, continued over the compressed bytes.
    finite: whether all its numbers are finite.
    """

    block: memoryview
    nbytes: int
    crc32: int
    finite: bool = True


class PieceCodec:
    """Encodes and decodes one piece at a time, in buffers of its own. Releases the GIL while it computes."""

    def __init__(self, max_bytes: int) -> None:
        """Allocate the buffers: as much memory as the largest piece, and with compression three times as much."""
        self._raw = aligned_block(max_bytes)
        self._planes = aligned_block(max_bytes)
        self._stored = aligned_block(compressed_bound(max_bytes))
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, chunks: Iterable[memoryview], itemsize: int, compression: SaveCompression) -> Encoded:
        """Return a piece of `chunks` one after the other, elements of `itemsize` bytes; valid until the next call."""
        raw_bytes, crc, finite = 0, 0, True
        for chunk in chunks:
            part = self._raw[raw_bytes : raw_bytes + len(chunk)]
            copy_bytes(chunk, part)
            crc = zlib.crc32(part, crc)  # now, while the chunk is in the CPU's cache
            finite = finite and is_finite(part, itemsize)  # takes a ninth of the checksum's time
            raw_bytes += len(chunk)
        if compression == "none":
            return Encoded(_padded(self._raw, raw_bytes), raw_bytes, crc, finite)
        for plane, values in self._byte_planes(raw_bytes, itemsize):
            np.copyto(plane, values)
        compressed = self._compressor.compress(self._planes[:raw_bytes])
        nbytes = len(compressed)
        copy_bytes(memoryview(compressed), self._stored[:nbytes])
        return Encoded(_padded(self._stored, nbytes), nbytes, zlib.crc32(compressed, crc), finite)

    def room(self, nbytes: int) -> memoryview:
        """Return the aligned block from which `decode` reads a piece of `nbytes`."""
        return self._stored[: aligned(nbytes)]

    def decode(self, nbytes: int, raw_bytes: int, itemsize: int, compression: SaveCompression) -> Encoded:
        """Decode the piece in `room`: its raw bytes are `nbytes` of `block`. Valid until the next call.

        Raises ValueError if it cannot be decompressed, or if its block does not end in zeros.

        nbytes: stored size of the piece.
        raw_bytes: size of the decoded piece.
        """
        stored = self.room(nbytes)
        if np.frombuffer(stored[nbytes:], np.uint8).any():
            raise ValueError(f"what follows its {nbytes} bytes is not zeros")
        if compression == "none":
            return Encoded(stored, nbytes, zlib.crc32(stored[:nbytes]))
        decompress(self._decompressor, stored[:nbytes], self._planes[:raw_bytes])
        for plane, values in self._byte_planes(raw_bytes, itemsize):
            np.copyto(values, plane)
        crc = zlib.crc32(stored[:nbytes], zlib.crc32(self._raw[:raw_bytes]))
        return Encoded(self._raw, raw_bytes, crc)

    def _byte_planes(self, raw_bytes: int, itemsize: int) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield for each byte of a number: its plane, and the same byte of all raw numbers."""
        planes = np.frombuffer(self._planes[:raw_bytes], np.uint8).reshape(itemsize, -1)
        numbers = np.frombuffer(self._raw[:raw_bytes], np.uint8).reshape(-1, itemsize)
        return zip(planes, numbers.T, strict=True)


def compressed_bound(nbytes: int) -> int:
    """Return the largest size that `nbytes` can have after compression (zstd.h's ZSTD_COMPRESSBOUND)."""
    return nbytes + nbytes // 256 + 64


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy bytes as `target[:] = source` does, but without holding the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def is_finite(numbers: memoryview, itemsize: int) -> bool:
    """Return whether no number is infinite or NaN. Of any other size than 2 (bf16) and 4 (FP32), nothing is known.

    Such numbers have all exponent bits set. Read as integers they are the largest ones, and those with a sign are the
    largest unsigned ones. So two reductions find them, without extra memory.
    """
    if itemsize not in (2, 4) or not numbers.nbytes:
        return True
    signed, unsigned = (np.int16, np.uint16) if itemsize == 2 else (np.int32, np.uint32)
    exponent, sign = (0x7F80, 0x8000) if itemsize == 2 else (0x7F800000, 0x80000000)
    positive, negative = np.frombuffer(numbers, signed).max(), np.frombuffer(numbers, unsigned).max()
    return bool(positive < exponent and negative < sign + exponent)


def _padded(block: memoryview, nbytes: int) -> memoryview:
    end = aligned(nbytes)
    block[nbytes:end] = bytes(end - nbytes)
    return block[:end]
