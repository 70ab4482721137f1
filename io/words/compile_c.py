"""Compiles C files on first use, into a cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from megatrain_ray.io.files.atomic_file import sync
from megatrain_ray.io.files.cache_folder import cache_folder

COMPILE_S = 120  # our files take one second
DIGEST_BYTES = 32
COMPILERS = ("cc", "gcc", "clang", "g++", "clang++")

Library = TypeVar("Library", bound=ctypes.CDLL)


class CompileError(Exception):
    """Reports that there is no compiler, or that it failed."""


def load_compiled(
    source: Path, flags: Sequence[str], load: Callable[[str], Library], includes: Sequence[Path] = ()
) -> Library:
    """Compile one C file, or find it in the cache, and load it as a shared library. Raises OSError, CompileError.

    If the cache cannot be used, the library is built in a temporary folder, which is deleted afterwards.

    load: ctypes.CDLL or ctypes.PyDLL.
    includes: files of ours that the source includes.
    """
    text = b"".join(file.read_bytes() for file in (source, *includes))
    key = hashlib.sha256(text + repr((*flags, platform.machine())).encode()).hexdigest()[:16]
    name = f"{source.stem}-{key}.so"
    try:
        return _load_or_build(source, flags, cache_folder() / name, load)
    except (OSError, RuntimeError):  # the cache has no home, is read-only, full, or mounted noexec
        with tempfile.TemporaryDirectory() as folder:
            return _load_or_build(source, flags, Path(folder) / name, load)


def declare(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    """Set the result and argument types of a function, and return the function."""
    function.restype = result
    function.argtypes = arguments
    return function


def _load_or_build(source: Path, flags: Sequence[str], library: Path, load: Callable[[str], Library]) -> Library:
    if _is_whole(library):
        with suppress(OSError):  # mounted noexec, or of another machine
            return load(str(library))
    library.parent.mkdir(parents=True, exist_ok=True)
    # Build under a unique name, then rename: another process loads a complete file or none.
    file, name = tempfile.mkstemp(suffix=".partial", prefix=f"{library.stem}.", dir=library.parent)
    os.close(file)
    partial = Path(name)
    try:
        _compile(source, flags, partial)
        with partial.open("ab") as library_file:  # loaders read what its headers name, not what follows
            library_file.write(_digest(partial.read_bytes()))
        sync(partial)  # a file torn by a crash of the machine might load, and fail only when called
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)
    return load(str(library))


def _is_whole(library: Path) -> bool:
    """Return whether the library is there and ends with the digest of its bytes: a flipped bit could end a process."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return _digest(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _compile(source: Path, flags: Sequence[str], output: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompileError(f"no C compiler on PATH (looked for {', '.join(COMPILERS)})")
    command = [compiler, str(source), *flags, "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{compiler} did not compile {source} within {COMPILE_S} s") from None
    if done.returncode:
        raise CompileError(f"{compiler} cannot compile {source}: {done.stderr.strip()}")
