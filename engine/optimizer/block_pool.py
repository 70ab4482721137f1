"""Runs jobs on threads that each have one torch thread and their own scratch buffers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from megatrain_ray.engine.optimizer.adamw import Scratch

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
        """Stop the threads. Idempotent."""
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
