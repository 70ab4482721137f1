"""Signal words: one contract for the compiled ones and for those without a compiler, in threads and processes."""

from __future__ import annotations

import multiprocessing
import shutil
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from enum import IntEnum
from pathlib import Path

import pytest

from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.words import atomic_words, compile_c
from megatrain_ray.io.words.atomic_words import Atomics, CompiledAtomics, Words, X86Atomics
from megatrain_ray.io.words.compile_c import CompileError

WAIT_S = 30.0
NUM_WORDS = 4
KINDS = [CompiledAtomics, X86Atomics]
Kind = Callable[[], Atomics]


class _Word(IntEnum):
    _BELL = 1


def new_words(kind: Kind) -> Words:
    return Words(memoryview(bytearray(8 * NUM_WORDS)), NUM_WORDS, kind())


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_independent_signed_64_bit_little_endian(kind: Kind) -> None:
    memory = bytearray(8 * NUM_WORDS)
    words = Words(memoryview(memory), NUM_WORDS, kind())
    words.store(1, 2**62 + 5)
    words.store(2, -1)
    assert words.add(1, 2**33) == words.load(1) == 2**62 + 2**33 + 5
    assert words.add(3, -7) == -7
    assert [words.load(i) for i in range(NUM_WORDS)] == [0, 2**62 + 2**33 + 5, -1, -7]
    assert struct.unpack("<4q", memory) == (0, 2**62 + 2**33 + 5, -1, -7)


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_is_bounded_and_names_the_word(kind: Kind) -> None:
    words = new_words(kind)
    words.store(1, 4)
    assert words.wait_at_least(1, 3, 0.0) == 4
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"signal word bell is 4, expected at least 5 within 0.02 s"):
        words.wait_at_least(_Word._BELL, 5, 0.02)
    assert 0.02 <= time.monotonic() - start < WAIT_S / 2
    with pytest.raises(DeadlineError, match=r"signal word 0 is 0"):
        words.wait_at_least(0, 1, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["store", "add"])
def test_a_sleeping_thread_is_woken_by_a_change(kind: Kind, change: str) -> None:
    words, answers = new_words(kind), list[int]()
    waiter = threading.Thread(target=lambda: answers.append(words.wait_at_least(2, 3, WAIT_S)))
    waiter.start()
    until_asleep(waiter)
    start = time.monotonic()
    for value in (1, 2, 3):  # not yet enough; not yet; enough
        words.store(2, value) if change == "store" else words.add(2, 1)
    waiter.join()
    assert answers == [3]
    assert time.monotonic() - start < WAIT_S / 2


def until_asleep(thread: threading.Thread) -> None:
    """State S while the waiting loop runs: in the kernel, so not before the wait, and without the GIL."""
    status = Path(f"/proc/self/task/{thread.native_id}/wchan")
    while "futex" not in status.read_text() and "S (sleeping)" not in status.with_name("status").read_text():
        pass


def echo(handles: Handles, kind: Kind, rounds: int) -> None:
    with closing(ArenaHolder.adopt([handles])) as holder:
        words = Words(holder.map("words").buffer, NUM_WORDS, kind())
        for i in range(1, rounds + 1):
            words.wait_at_least(0, i, WAIT_S)
            words.add(2, 1)
            words.store(1, i)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_no_wake_up_is_lost_between_processes(kind: Kind, other: Kind) -> None:
    """Each round waits for the other side's word: one lost wake-up and the deadline passes. Kinds may be mixed."""
    rounds = 2000
    with closing(ArenaHolder.create({"words": 8 * NUM_WORDS})) as holder:
        words = Words(holder.map("words").buffer, NUM_WORDS, kind())
        child = multiprocessing.get_context("spawn").Process(target=echo, args=(holder.handles, other, rounds))
        child.start()
        for i in range(1, rounds + 1):
            words.store(0, i)
            words.add(2, 1)
            assert words.wait_at_least(1, i, WAIT_S) == i
        child.join()
        assert child.exitcode == 0
        assert words.load(2) == 2 * rounds


def count(handles: Handles, kind: Kind, times: int) -> None:
    with closing(ArenaHolder.adopt([handles])) as holder:
        words, atomic = Words(holder.map("words").buffer, NUM_WORDS, kind()), kind()
        address = words._at(1)
        words.add(0, 1)
        words.wait_at_least(0, 2, WAIT_S)
        for _ in range(times):  # past Words, whose waking leaves little time for collisions
            atomic.add(address, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_addition_is_lost_between_processes(kind: Kind) -> None:
    context, times = multiprocessing.get_context("spawn"), 500_000
    with closing(ArenaHolder.create({"words": 8 * NUM_WORDS})) as holder:
        children = [context.Process(target=count, args=(holder.handles, kind, times)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0, 0]
        assert Words(holder.map("words").buffer, NUM_WORDS).load(1) == 2 * times


def test_memory_that_cannot_hold_the_words_is_refused() -> None:
    memory = memoryview(bytearray(33))
    with pytest.raises(MegatrainError, match="4 signal words need 32 writable bytes, got 31"):
        Words(memory[:31], 4)
    with pytest.raises(MegatrainError, match="32 writable bytes, got 32, read-only"):
        Words(memory[:32].toreadonly(), 4)
    with pytest.raises(MegatrainError, match="expected a multiple of 8"):
        Words(memory[1:], 4)
    words = Words(memory[:32], 4)
    for i in (-1, 4):
        with pytest.raises(IndexError):
            words.load(i)


def test_the_library_is_built_once_and_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    CompiledAtomics()
    (library,) = (tmp_path / ".cache" / "megatrain-ray").iterdir()
    built = library.stat().st_mtime_ns
    CompiledAtomics()
    assert library.stat().st_mtime_ns == built
    other_home = tmp_path / "other"  # the loader knows the first path by name and would not look into the file again
    damaged = other_home / library.relative_to(tmp_path)
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(other_home / ".cache"))
    CompiledAtomics()
    assert [p.name for p in damaged.parent.iterdir()] == [library.name]
    assert damaged.stat().st_size == library.stat().st_size


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").touch()  # a file where the folder should be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    assert Words(memoryview(bytearray(8)), 1, CompiledAtomics()).add(0, 3) == 3


def test_without_a_compiler_the_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    fresh = atomic_words.load_atomics.__wrapped__  # without the cache
    assert isinstance(fresh(), X86Atomics)
    assert [r.getMessage() for r in caplog.records] == [
        "signal words without C (slower, x86-64 only): no C compiler on PATH (looked for cc, gcc, clang, g++, clang++)"
    ]
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(MegatrainError, match="need a C compiler on riscv64: install gcc"):
        fresh()


def test_what_the_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int words(;")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr(atomic_words, "SOURCE", broken)
    with pytest.raises(CompileError, match=r"(?s)cannot compile .*broken.c.*error"):
        CompiledAtomics()
    assert not list((tmp_path / ".cache" / "megatrain-ray").iterdir())


def test_the_source_is_also_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr(compile_c, "COMPILERS", ("g++",))
    assert Words(memoryview(bytearray(8)), 1, CompiledAtomics()).add(0, 3) == 3
