"""Implements the portable update kernel: torch's operations on blocks, in threads that each have one torch thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.optimizer.adamw import AdamWConstants, UpdateParams
from megatrain_ray.engine.optimizer.torch_blocks import Scratch, update_block
from megatrain_ray.engine.optimizer.undo_log import ParamSlice, Transaction, blocks_of

COPY_ELEMENTS = 1 << 20
Job = Callable[[Scratch], None]


class BlockPool:
    """Runs `num_threads` threads that take jobs from one queue.

    A job's result must not depend on which thread runs it.
    """

    def __init__(self, num_threads: int) -> None:
        self._scratch = [Scratch(thread) for thread in range(num_threads)]
        self._pool = _single_threaded_pool(num_threads)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs and return when they are done.

        After a job has raised, no other begins. Its error is raised here once all threads have stopped working.
        """
        queue = deque(jobs)

        def work(scratch: Scratch) -> None:
            while True:
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                try:
                    job(scratch)
                except BaseException:
                    queue.clear()
                    raise

        futures = [self._pool.submit(work, scratch) for scratch in self._scratch[: len(queue)]]
        errors = [future.exception() for future in futures]
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        self._pool.shutdown()


def _single_threaded_pool(num_threads: int) -> ThreadPoolExecutor:
    """Start a pool of threads that each use one torch thread.

    A thread takes torch's number of threads from the process's last setting when it first needs it. So all threads
    start here, each with the setting 1. Then the setting is restored for threads that others start later.
    """
    setting = torch.get_num_threads()
    started = threading.Barrier(num_threads)

    def initialize() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # from here on later settings of other threads do not reach this one

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="adamw", initializer=initialize)
    for future in [pool.submit(started.wait) for _ in range(num_threads)]:
        future.result()
    torch.set_num_threads(setting)
    return pool


class TorchBlocks:
    """Is an UpdateKernel for every machine on which torch runs."""

    name = "torch blocks"

    def __init__(self, num_threads: int, hyper: AdamWConstants) -> None:
        self._hyper = hyper
        self._pool = BlockPool(num_threads)

    def update(
        self,
        parts: Sequence[ParamSlice],
        gradient: Tensor,
        params: UpdateParams,
        transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:
        def job(part: ParamSlice, units: ElementRange, scratch: Scratch) -> None:
            # Cut here, by the thread that works on the block: if only the caller cut, the others would wait for it.
            elements = part.elements(units)
            if transaction:
                transaction.journal.save(scratch.thread, units, part.state.cut(elements), transaction.serial)
            update_block(part, elements, gradient, directions, self._hyper, params, scratch)
            if transaction:
                transaction.journal.mark(units, transaction.serial)

        self._pool.run(partial(job, part, units) for part in parts for units in _blocks(part, transaction))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pool.run(job for to, source in pairs for job in _copy_jobs(to, source))

    def close(self) -> None:
        self._pool.close()


def _blocks(part: ParamSlice, transaction: Transaction | None) -> Iterator[ElementRange]:
    return transaction.journal.unmarked_blocks(part, transaction.serial) if transaction else blocks_of(part.units)


def _copy_jobs(to: Tensor, source: Tensor) -> Iterator[Job]:
    for start in range(0, source.numel(), COPY_ELEMENTS):
        piece = slice(start, start + COPY_ELEMENTS)
        yield partial(_copy, to[piece], source[piece])


def _copy(to: Tensor, source: Tensor, _: Scratch) -> None:
    to.copy_(source)
