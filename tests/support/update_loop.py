"""Runs children that update a layer until they are killed. This is the main of their parent process.

    python -m tests.support.update_loop FD PRECISION KERNEL NUM_THREADS

For each line on stdin it forks a child, prints its pid, and reaps it. So torch is imported only once.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.optimizer.update_kernel import open_kernel
from megatrain_ray.io.words.atomic_words import Words
from tests.support.shards import hyper_for
from tests.support.transactions import KERNELS, NUM_GRADIENTS, Memory, header, one_layer

BEGUN, FINISHED, WORD_BYTES = 0, 1, 4096  # words: the last update begun, the last one finished; on a page of their own


def update_until_killed(
    memory: Memory, gradients: Sequence[Tensor], directions: Tensor, words: Words, kernel: str, num_threads: int
) -> None:
    with memory.shard(KERNELS[kernel], num_threads) as shard:
        update = words.load(FINISHED) + 1
        while True:
            words.store(BEGUN, update)
            shard.update(0, gradients[update % NUM_GRADIENTS], header(update), update, directions)
            words.store(FINISHED, update)
            update += 1


def main() -> None:
    fd, precision, kernel, num_threads = int(sys.argv[1]), Precision(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    buffer = memoryview(mmap.mmap(fd, 0))
    memory = Memory(buffer[WORD_BYTES:], precision, one_layer(precision))
    torch.set_num_threads(1)  # OpenMP's threads would not survive the fork
    gradients, directions = memory.gradients(), memory.directions()
    open_kernel(1, hyper_for(precision)).close()
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            update_until_killed(memory, gradients, directions, Words(buffer, 2), kernel, num_threads)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
