"""Atomic 8-byte words by address: the C file, compiled on first use; on x86-64 also without a compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from megatrain_ray.errors import MegatrainError

COMPILERS = ("cc", "gcc", "clang", "g++", "clang++")
FLAGS = ("-O2", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("words.c")

log = logging.getLogger(__name__)


class Atomics(Protocol):
    """Operations on a word at an address, a multiple of 8, in memory that several processes map."""

    def load(self, address: int) -> int:
        """With acquire order."""

    def store(self, address: int, value: int) -> None:
        """With release order."""

    def add(self, address: int, n: int) -> int:
        """In one piece; returns the new value."""

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        """Sleeps, without the GIL, while the word is `seen` and nobody wakes, at most `timeout_s`. May return early."""

    def wake(self, address: int) -> None:
        """Wakes all who wait on the word, in every process."""


class CompiledAtomics:
    """words.c. Raises OSError or CompileError where it cannot be built or loaded."""

    def __init__(self) -> None:
        library = _load_library()
        # PyDLL keeps the GIL: what takes 20 ns must not wait for the interpreter's next switch, up to 5 ms.
        self.load = _function(library.word_load, ctypes.c_int64, ctypes.c_void_p)
        self.store = _function(library.word_store, None, ctypes.c_void_p, ctypes.c_int64)
        self.add = _function(library.word_add, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self.wake = _function(library.word_wake, None, ctypes.c_void_p)
        without_gil = ctypes.CDLL(None, handle=library._handle)
        self._wait = _function(without_gil.word_wait, None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        self._wait(address, seen, int(timeout_s * 1e9))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class X86Atomics:
    """Without a compiler: on x86-64 an aligned 8-byte move acquires and releases as it is; the addition is one
    instruction, written as bytes."""

    FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
    # mov rax, rsi; lock xadd [rdi], rax; ret: returns the old value
    FETCH_ADD = bytes.fromhex("4889f0 f0480fc107 c3")

    def __init__(self) -> None:
        """Raises MegatrainError on any other machine, or where memory may not be executable."""
        if platform.machine() != "x86_64" or sys.maxsize < 2**32:
            raise MegatrainError(f"signal words need a C compiler on {platform.machine()}: install gcc")
        try:
            self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        except OSError as error:
            raise MegatrainError(f"signal words need a C compiler here: install gcc ({error.strerror})") from None
        self._code.write(self.FETCH_ADD)
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._fetch_add = prototype(ctypes.addressof(ctypes.c_char.from_buffer(self._code)))
        self._syscall = ctypes.CDLL(None).syscall

    def load(self, address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    def store(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def add(self, address: int, n: int) -> int:
        return int(self._fetch_add(address, n)) + n

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        timeout = _Timespec(*divmod(int(timeout_s * 1e9), 10**9))
        self._futex(address, self.FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(timeout))

    def wake(self, address: int) -> None:
        self._futex(address, self.FUTEX_WAKE, 2**31 - 1, None)

    def _futex(self, address: int, operation: int, value: int, timeout: object) -> None:
        self._syscall(
            ctypes.c_long(self.FUTEX), ctypes.c_void_p(address), ctypes.c_long(operation), ctypes.c_long(value), timeout
        )


class CompileError(Exception):
    """No compiler, or one that fails."""


@functools.cache
def load_atomics() -> Atomics:
    """The compiled ones; without a compiler those for x86-64, which is logged once. Raises MegatrainError elsewhere."""
    try:
        return CompiledAtomics()
    except (OSError, CompileError) as error:
        log.warning("signal words without C (slower, x86-64 only): %s", error)
        return X86Atomics()


def _function(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function.restype = result
    function.argtypes = arguments
    return function


def _load_library() -> ctypes.PyDLL:
    """From the user's cache; from a folder that is gone afterwards where there is none."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, platform.machine())).encode()).hexdigest()[:16]
    try:
        return _load_or_build(Path.home() / ".cache" / "megatrain-ray" / f"words-{key}.so")
    except (OSError, RuntimeError):  # no home, read-only, full, or mounted noexec
        with tempfile.TemporaryDirectory() as folder:
            return _load_or_build(Path(folder) / "words.so")


def _load_or_build(library: Path) -> ctypes.PyDLL:
    with suppress(OSError):  # missing, or damaged by a crash of the machine
        return ctypes.PyDLL(str(library))
    library.parent.mkdir(parents=True, exist_ok=True)
    # Under a name of its own and then renamed: another process loads a whole file or none.
    partial = library.with_suffix(f".{os.getpid()}.partial")
    try:
        _compile(partial)
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)
    return ctypes.PyDLL(str(library))


def _compile(output: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompileError(f"no C compiler on PATH (looked for {', '.join(COMPILERS)})")
    done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(output)], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{compiler} cannot compile {SOURCE}: {done.stderr.strip()}")
