"""Stands between Python and the disk: sees each call that changes a file of one folder, and can let it fail.

Covered are the functions of `os` and files that `open` and `Path.open` return. Libraries in C that open files
themselves are not.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Functions of `os` by where they name what they change: a path, two paths, or an open file.
OF_PATHS = ("mkdir", "rmdir", "unlink", "remove", "truncate", "chmod")
OF_TWO_PATHS = ("rename", "replace", "link", "symlink")
OF_FILES = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "posix_fallocate", "sendfile")
DURABLE = ("fsync", "fdatasync")  # they change nothing that another process can see
CREATES = os.O_CREAT | os.O_TRUNC
RANDOM = re.compile(r"[0-9a-f]{8}")


class DiskCall(NamedTuple):
    """Describes a call that is about to change something. `path`: relative to the folder, random parts as *."""

    name: str
    path: str


Before = Callable[[DiskCall], None]


@contextmanager
def disk_calls(folder: Path, before: Before) -> Iterator[None]:
    """Call `before` ahead of each call in the block that changes something in `folder`, one call at a time.

    What `before` raises is raised by the call, which then changes nothing.
    """
    seam = _Seam(folder.resolve(), before)
    with pytest.MonkeyPatch.context() as patch:
        for name in OF_PATHS:
            patch.setattr(os, name, seam.wrapped(name, lambda path, *_, dir_fd=None, **__: _path(path, dir_fd)))
        for name in OF_TWO_PATHS:
            patch.setattr(os, name, seam.wrapped(name, lambda _, path, *__, **___: _path(path, None)))
        for name in OF_FILES:
            patch.setattr(os, name, seam.wrapped(name, lambda fd, *_, **__: _path(fd, None)))
        patch.setattr(os, "open", seam.wrapped("open", _created))
        opened = seam.opened(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield


class _Seam:
    def __init__(self, folder: Path, before: Before) -> None:
        self._folder = folder
        self._before = before
        self._lock = threading.RLock()
        self._is_inside = threading.local()  # `before` may use the disk itself

    def about_to(self, name: str, path: Path | None) -> None:
        if path is None or not path.is_relative_to(self._folder) or getattr(self._is_inside, "value", False):
            return
        self._is_inside.value = True
        try:
            with self._lock:
                self._before(DiskCall(name, RANDOM.sub("*", str(path.relative_to(self._folder)))))
        finally:
            self._is_inside.value = False

    def wrapped(self, name: str, where: Callable[..., Path | None]) -> Callable[..., Any]:
        call = getattr(os, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            self.about_to(name, where(*args, **kwargs))
            return call(*args, **kwargs)

        return seen

    def opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def seen(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            path = None if isinstance(file, int) or kwargs.get("opener") else _path(file, None)
            if path is None or not path.is_relative_to(self._folder) or not set(mode) & set("wax+"):
                return call(file, mode, buffering, *args, **kwargs)
            if set(mode) & set("wax"):
                self.about_to("open", path)
            raw = _SeenFile(file, mode.replace("b", "").replace("t", ""))
            raw.about_to = lambda: self.about_to("write", path)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        return seen


class _SeenFile(io.FileIO):
    about_to: Callable[[], None]

    def write(self, data: Any, /) -> int:
        self.about_to()
        return super().write(data)


def _path(path: Any, dir_fd: int | None) -> Path | None:
    """Return the absolute path of what an argument of a function of `os` means; None if it has none."""
    if isinstance(path, int):
        target = Path(f"/proc/self/fd/{path}").readlink()
        return target if target.is_absolute() else None
    named = Path(os.fsdecode(path))
    if dir_fd is not None:
        return Path(f"/proc/self/fd/{dir_fd}").readlink() / named
    return Path.cwd() / named


def _created(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Path | None:
    return _path(path, dir_fd) if flags & CREATES else None


class Moment(NamedTuple):
    """Holds a copy of a folder as a kill ahead of `call` would leave it."""

    call: DiskCall
    folder: Path


class Moments:
    """Copies a folder ahead of each call that changes something in it.

    Pass it to `disk_calls` as `before`. Marks of copied folders are mended: they hold the number of the inode.
    """

    def __init__(self, folder: Path, into: Path) -> None:
        self._folder = folder
        self._into = into
        self.all: list[Moment] = []

    def __call__(self, call: DiskCall) -> None:
        if call.name in DURABLE:
            return
        copy = self._into / f"{len(self.all):03}"
        shutil.copytree(self._folder, copy, symlinks=True)
        for mark in copy.rglob("owner.json"):
            text = mark.read_text()
            mark.write_text(re.sub(r'"inode": \d+', f'"inode": {mark.parent.stat().st_ino}', text))
        self.all.append(Moment(call, copy))
