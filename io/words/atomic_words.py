"""Provides signal words in shared memory. They are counters by which processes tell each other what has happened."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import platform
import sys
import time
from enum import IntEnum
from pathlib import Path

from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.words.compile_c import CompileError, declare, load_compiled

FLAGS = ("-O2", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("words.c")

log = logging.getLogger(__name__)


class CompiledAtomics:
    """Calls words.c on words in memory that several processes map, each at an address that is a multiple of 8.

    load: loads a word with acquire order.
    store: stores a word with release order.
    add: adds to a word atomically and returns the new value.
    wake: wakes all who wait for a word, in every process.
    """

    def __init__(self) -> None:
        """Compile and load words.c. Raises OSError or CompileError if that cannot be done."""
        library = load_compiled(SOURCE, FLAGS, ctypes.PyDLL)
        # PyDLL keeps the GIL: a call of 20 ns must not wait up to 5 ms for the interpreter's next thread switch.
        self.load = declare(library.word_load, ctypes.c_int64, ctypes.c_void_p)
        self.store = declare(library.word_store, None, ctypes.c_void_p, ctypes.c_int64)
        self.add = declare(library.word_add, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self.wake = declare(library.word_wake, None, ctypes.c_void_p)
        without_gil = ctypes.CDLL(None, handle=library._handle)
        self._wait = declare(without_gil.word_wait, None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        """Sleep, without the GIL, while the word equals `seen`, nobody wakes it, and time is left; perhaps shorter."""
        self._wait(address, seen, int(timeout_s * 1e9))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class X86Atomics:
    """Does the same without a compiler, on x86-64 only.

    There an aligned 8-byte move acquires and releases by itself. The addition is one instruction, written as bytes.
    """

    FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
    # mov rax, rsi; lock xadd [rdi], rax; ret. It returns the old value.
    FETCH_ADD = bytes.fromhex("4889f0 f0480fc107 c3")

    def __init__(self) -> None:
        """Make the addition's machine code executable. Raises MegatrainError where that cannot be done."""
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


Atomics = CompiledAtomics | X86Atomics


@functools.cache
def load_atomics() -> Atomics:
    """Return the compiled atomics, or those for x86-64 if there is no compiler. Raises MegatrainError without both."""
    try:
        return CompiledAtomics()
    except (OSError, CompileError) as error:
        log.warning("signal words without C (slower, x86-64 only): %s", error)
        return X86Atomics()


WORD_BYTES = 8


class Words:
    """Holds `count` signed 64-bit words in shared memory.

    A word that somebody waits for is a counter that only grows. A word may also hold the bits of a float64. A process
    that loads a value sees everything that was written before that value was stored, by any process.
    """

    def __init__(self, buffer: memoryview, count: int, atomics: Atomics | None = None) -> None:
        """Use the first `count` words of `buffer`, which is writable.

        Raises MegatrainError if the buffer is too small, read-only, or at no multiple of 8.
        """
        if buffer.readonly or buffer.nbytes < WORD_BYTES * count:
            raise MegatrainError(
                f"{count} signal words need {WORD_BYTES * count} writable bytes, got {buffer.nbytes}"
                f"{', read-only' if buffer.readonly else ''}"
            )
        self._memory = (ctypes.c_char * (WORD_BYTES * count)).from_buffer(buffer)  # keeps the memory mapped
        self._address = ctypes.addressof(self._memory)
        self._count = count
        self._atomics = atomics or load_atomics()
        if self._address % WORD_BYTES:
            raise MegatrainError(f"signal words at address {self._address:#x}: expected a multiple of {WORD_BYTES}")

    def load(self, i: int) -> int:
        return self._atomics.load(self._at(i))

    def store(self, i: int, value: int) -> None:
        """Store a value and wake everybody who waits for the word."""
        self._atomics.store(self._at(i), value)
        self.wake(i)

    def add(self, i: int, n: int) -> int:
        """Add `n` atomically, also between processes; wake everybody who waits, and return the new value."""
        value = self._atomics.add(self._at(i), n)
        self.wake(i)
        return value

    def wait_at_least(self, i: int, value: int, timeout_s: float) -> int:
        """Block, without the GIL, until word `i` is at least `value`; return its value then.

        Raises DeadlineError after `timeout_s`. The error names the word if `i` is a member of an enum.
        """
        deadline_s = time.monotonic() + timeout_s
        while (seen := self.load(i)) < value:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"{_name(i)} is {seen}, expected at least {value} within {timeout_s} s")
            self._atomics.wait(self._at(i), seen, left_s)
        return seen

    def wake(self, i: int) -> None:
        """Make everybody who waits for the word check it again."""
        self._atomics.wake(self._at(i))

    def _at(self, i: int) -> int:
        if not 0 <= i < self._count:
            raise IndexError(f"{_name(i)}: there are {self._count}")
        return self._address + WORD_BYTES * i


def _name(i: int) -> str:
    return f"signal word {i.name.strip('_').lower()}" if isinstance(i, IntEnum) else f"signal word {i}"
