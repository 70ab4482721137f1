"""Provides signal words in shared memory.

They are counters by which processes tell each other what has happened.
"""

from __future__ import annotations

import ctypes
import struct
import time
from enum import IntEnum

from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.words.atomics import Atomics, load_atomics

WORD_BYTES = 8


class Words:
    """Holds `count` signed 64-bit words in shared memory.

    A word that somebody waits for is a counter that only grows. A word may also hold the bits of a float64. A process
    that loads a value sees everything that was written before that value was stored, by any process.
    """

    def __init__(self, buffer: memoryview, count: int, atomics: Atomics | None = None) -> None:
        """Use the first `count` words of `buffer`.

        Raises MegatrainError if the buffer is too small, not aligned, or read-only.

        buffer: writable, at least `count` words, at an address that is a multiple of 8.
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
        """Add `n` atomically, also between processes, and return the new value.

        Wakes everybody who waits for the word.
        """
        value = self._atomics.add(self._at(i), n)
        self.wake(i)
        return value

    def load_float(self, i: int) -> float:
        value: float = struct.unpack("<d", struct.pack("<q", self.load(i)))[0]
        return value

    def store_float(self, i: int, value: float) -> None:
        """Store the exact bits of a float64, NaNs included."""
        self.store(i, struct.unpack("<q", struct.pack("<d", value))[0])

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
