"""Stands in for the library kvikio, which works on machines with CUDA's driver only.

Files are read and written as its threads do it, but in the calling thread.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class IOFuture:
    def __init__(self, done: Future[int]) -> None:
        self._done = done

    def get(self) -> int:
        return self._done.result()


class CuFile:
    """Imitates kvikio's CuFile. Errors have the texts of kvikio 26.10."""

    def __init__(self, file: Path | str, flags: str = "r") -> None:
        assert flags == "r+", "what is there is updated"
        try:
            self._fd = os.open(file, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(
                f"Unable to open file. Linux system call error at: file_utils.cpp:160: {error.strerror}"
            ) from None

    def fileno(self) -> int:
        return self._fd

    def pread(self, buf: memoryview, size: int | None = None, file_offset: int = 0) -> IOFuture:
        return _submitted("pread", os.preadv, self._fd, [buf], file_offset)

    def pwrite(self, buf: memoryview, size: int | None = None, file_offset: int = 0) -> IOFuture:
        return _submitted("pwrite", os.pwrite, self._fd, buf, file_offset)

    def close(self) -> None:
        os.close(self._fd)


def _submitted(name: str, call: Any, *arguments: Any) -> IOFuture:
    done = Future[int]()
    try:
        done.set_result(call(*arguments))
    except OSError as error:
        done.set_exception(RuntimeError(f"KvikIO failure at: posix_io.hpp:90: POSIX error on {name}: {error.strerror}"))
    if not done.exception() and done.result() == 0:
        done = Future[int]()
        done.set_exception(RuntimeError(f"KvikIO failure at: posix_io.hpp:173: POSIX error on {name}: EOF"))
    return IOFuture(done)


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make `import kvikio` find the imitation for the rest of a test. Returns the settings that are made."""
    settings: dict[str, Any] = {}
    library, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")
    setattr(library, "CuFile", CuFile)  # noqa: B010, a module has no such attribute for mypy
    setattr(library, "defaults", defaults)  # noqa: B010
    setattr(defaults, "set", settings.update)  # noqa: B010
    monkeypatch.setitem(sys.modules, "kvikio", library)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    return settings
