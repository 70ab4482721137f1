"""Updates files that this process holds open through kvikio, which has threads of its own.

kvikio is an optional dependency. It asks CUDA's driver about every buffer, so it works only on machines with a GPU, and
not on all of those. `unusable` tries it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import FULL, GONE, explained
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, Blob, OpenFile, aligned_block
from megatrain_ray.io.storage.disk_io import HeldFiles

NUM_THREADS = 8  # kvikio's threads in this process: one for each block in flight (spill/spill_transfers.py)
THREAD_BYTES = 4 << 20  # that a thread moves at a time; also its pinned memory for GPU blocks
# For kvikio 25.12 and later. By default it reads host memory through the page cache, and has four times the pinned
# memory.
SETTINGS = {
    "num_threads": NUM_THREADS,
    "task_size": THREAD_BYTES,
    "bounce_buffer_size": THREAD_BYTES,
    "auto_direct_io_read": True,
    "auto_direct_io_write": True,
}


class KvikioFiles(HeldFiles):
    """Opens files with kvikio in `update`. All other methods are those of HeldFiles."""

    def __init__(self) -> None:
        """Configure kvikio. Raises MegatrainError if kvikio cannot be imported or is too old."""
        super().__init__()
        try:
            import kvikio
            import kvikio.defaults

            kvikio.defaults.set(SETTINGS)
        except Exception as error:  # ImportError, also for a missing library; kvikio's error for an unknown setting
            raise MegatrainError(f"kvikio cannot be used: {_in_a_line(error)}") from error
        self._open = kvikio.CuFile

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        where = self._where(name)
        with explained("read", where), _os_errors():
            file = await asyncio.to_thread(self._open, self._folder / name, "r+")
        try:
            yield _OpenKvikioFile(where, file)
        finally:
            await asyncio.to_thread(file.close)


class _OpenKvikioFile(OpenFile):
    """Reads and writes an open file (kvikio.CuFile), of host or GPU memory, in several threads."""

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(path, file.fileno())
        self._file = file

    def _write(self, offset: int, block: memoryview) -> None:
        with _os_errors():
            written = self._file.pwrite(block, file_offset=offset).get()
        if written != len(block):
            raise OSError(errno.EIO, f"kvikio wrote {written} of {len(block)} bytes")

    def _read(self, offset: int, block: memoryview) -> int:
        there = os.fstat(self._fd).st_size - offset
        if there < len(block):  # kvikio fails for reads beyond the end
            return max(0, there)
        with _os_errors():
            return int(self._file.pread(block, file_offset=offset).get())


def unusable(folder: Path) -> str | None:
    """Return why kvikio could not write a page in `folder` and read it back; None if it could."""
    try:
        with explained("write", folder), tempfile.TemporaryFile(dir=folder) as file:
            os.ftruncate(file.fileno(), ALIGN_BYTES)
            return asyncio.run(_try(KvikioFiles(), str(file.fileno())))
    except MegatrainError as error:
        return str(error)


async def _try(store: KvikioFiles, name: str) -> str | None:
    written, read = aligned_block(ALIGN_BYTES), aligned_block(ALIGN_BYTES)
    written[:] = os.urandom(ALIGN_BYTES)
    async with store.update(name) as blob:
        await blob.write_at(0, written)
        await blob.read_into(0, read)
    return None if read == written else f"kvikio read something else than it wrote to {store.describe(name)}"


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turn what kvikio raises into OSError. The error gets the system's error number if kvikio's text names one."""
    try:
        yield
    except RuntimeError as error:
        text = _in_a_line(error)
        number = next((code for code in (*FULL, *GONE) if os.strerror(code) in text), None)
        raise OSError(number, f"kvikio: {text}") from error


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())
