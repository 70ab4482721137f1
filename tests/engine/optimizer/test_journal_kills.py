"""Shards killed by SIGKILL in the middle of updates, at random moments: not a bit may differ afterwards."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.io.words.atomic_words import Words
from tests.support.transactions import KERNELS, NUM_GRADIENTS, Memory, header, one_layer
from tests.support.update_loop import BEGUN, FINISHED, WORD_BYTES

NUM_TORN, MAX_KILLS = 8, 200  # on a busy machine many kills hit a child that waits for a core between updates
WAIT_S = 60.0


class Updater:
    """Drives a process of tests/support/update_loop.py over the same memory."""

    def __init__(self, words: Words, stdin: IO[str], stdout: IO[str]) -> None:
        self._words, self._stdin, self._stdout = words, stdin, stdout

    def run_and_kill(self, num_updates: int, delay_s: float) -> None:
        """Kill a child `delay_s` after it has done `num_updates`."""
        target = self._words.load(FINISHED) + num_updates
        print("go", file=self._stdin, flush=True)
        pid = int(self._stdout.readline())
        self._words.wait_at_least(FINISHED, target, WAIT_S)
        end_s = time.perf_counter() + delay_s
        while time.perf_counter() < end_s:
            pass
        os.kill(pid, signal.SIGKILL)
        assert self._stdout.readline() == "gone\n"


@contextmanager
def updating(precision: Precision, kernel: str, num_threads: int) -> Iterator[tuple[Updater, Words, Memory]]:
    part = one_layer(precision)
    fd = os.memfd_create("journal kills")
    os.truncate(fd, WORD_BYTES + Memory.num_bytes(part, precision))
    buffer = memoryview(mmap.mmap(fd, 0))
    command = [
        sys.executable,
        "-m",
        "tests.support.update_loop",
        str(fd),
        precision.value,
        kernel,
        str(num_threads),
    ]
    child = subprocess.Popen(
        command,
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    os.close(fd)
    try:
        assert child.stdin
        assert child.stdout
        words = Words(buffer, 2)
        yield Updater(words, child.stdin, child.stdout), words, Memory(buffer[WORD_BYTES:], precision, part).fill()
    finally:
        child.communicate()  # its stdin ends, and so does it
    assert child.returncode == 0


@pytest.mark.spread(2)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32, Precision.BF16_NARROW], ids=lambda p: p.value)
@pytest.mark.parametrize("kernel", KERNELS)
def test_killed_at_random_moments(kernel: str, precision: Precision) -> None:
    """The other kernel rolls forward every second time, with one thread or two."""
    moments, num_torn = random.Random(f"{kernel} {precision}"), 0
    with updating(precision, kernel, num_threads=2) as (updater, words, memory):
        undisturbed, gradients, done = memory.copy(), memory.gradients(), 0
        directions = memory.directions()
        for kill in range(MAX_KILLS):
            updater.run_and_kill(moments.randint(1, 3), moments.uniform(0, 8e-3))
            update = words.load(BEGUN)
            if update > words.load(FINISHED):
                num_torn += 1
                finish(memory, update, kernel if kill % 2 else other(kernel), 1 + kill % 3 % 2)
                words.store(FINISHED, update)
            with undisturbed.shard(KERNELS["native"]) as shard:
                for later in range(done + 1, update + 1):
                    shard.update(0, gradients[later % NUM_GRADIENTS], header(later), later, directions)
            done = update
            memory.assert_equal(undisturbed)
            if num_torn == NUM_TORN:
                return
    pytest.fail(f"{MAX_KILLS} kills hit {num_torn} updates only")


def other(kernel: str) -> str:
    return next(name for name in KERNELS if name != kernel)


def finish(memory: Memory, update: int, kernel: str, num_threads: int) -> None:
    with memory.shard(KERNELS[kernel], num_threads) as shard:
        shard.roll_back(0, update)
        shard.update(0, memory.gradient(update), header(update), update, memory.directions())
