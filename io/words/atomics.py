"""Operates on atomic 8-byte words by address.

It uses a C file that is compiled on first use. On x86-64 it also works without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import platform
import sys
from pathlib import Path
from typing import Protocol

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.words.compile_c import CompileError, declare, load_compiled

FLAGS = ("-O2", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("words.c")

log = logging.getLogger(__name__)


class Atomics(Protocol):
    """Defines the operations on a word in memory that several processes map.

    address: a multiple of 8.
    """

    def load(self, address: int) -> int:
        """Load the word with acquire order."""

    def store(self, address: int, value: int) -> None:
        """Store the word with release order."""

    def add(self, address: int, n: int) -> int:
        """Add `n` atomically and return the new value."""

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        """Sleep, without the GIL, while the word equals `seen` and nobody calls `wake`.

        Sleeps for at most `timeout_s`, and may return early.
        """

    def wake(self, address: int) -> None:
        """Wake all who wait for the word, in every process."""


class CompiledAtomics:
    """Calls words.c. Raises OSError or CompileError if that cannot be built or loaded."""

    def __init__(self) -> None:
        library = load_compiled(SOURCE, FLAGS, ctypes.PyDLL)
        # PyDLL keeps the GIL: a call of 20 ns must not wait up to 5 ms for the interpreter's next thread switch.
        self.load = declare(library.word_load, ctypes.c_int64, ctypes.c_void_p)
        self.store = declare(library.word_store, None, ctypes.c_void_p, ctypes.c_int64)
        self.add = declare(library.word_add, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self.wake = declare(library.word_wake, None, ctypes.c_void_p)
        without_gil = ctypes.CDLL(None, handle=library._handle)
        self._wait = declare(without_gil.word_wait, None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        self._wait(address, seen, int(timeout_s * 1e9))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class X86Atomics:
    """Works without a compiler, on x86-64 only.

    There an aligned 8-byte move acquires and releases by itself. The addition is one instruction, written as bytes.
    """

    FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
    # mov rax, rsi; lock xadd [rdi], rax; ret. It returns the old value.
    FETCH_ADD = bytes.fromhex("4889f0 f0480fc107 c3")

    def __init__(self) -> None:
        """Make the machine code of the addition executable.

        Raises MegatrainError on any other machine, or if memory may not be executable.
        """
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


@functools.cache
def load_atomics() -> Atomics:
    """Return the compiled atomics, or those for x86-64 if there is no compiler.

    Falling back is logged once. Raises MegatrainError without a compiler on other machines.
    """
    try:
        return CompiledAtomics()
    except (OSError, CompileError) as error:
        log.warning("signal words without C (slower, x86-64 only): %s", error)
        return X86Atomics()
