"""Maps a function over many items in several processes, with results in the order of the items.

The processes are loky's, not multiprocessing's. Those import the program that starts them once more, which fails for a
script without `if __name__ == "__main__"`. Forked ones would inherit the locks of a tokenizer's threads.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import loky

from megatrain_ray.errors import MegatrainError

ALONE_BYTES = 2 << 20  # pickled items processed here before processes are started, which take 2 s to the first result
BATCH_BYTES = 1 << 18  # size at which a batch of pickled items is complete
ANSWER_S = 600.0  # bound on one batch, which takes milliseconds
PR_SET_PDEATHSIG = 1  # of prctl
BATCHES_EACH = 2  # batches per process that are in flight, or done with results not yet yielded

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[[Any], Any]  # of a child process, which would else receive it with each batch


def map_in_order(
    work: Callable[[Item], Result], items: Iterable[tuple[Key, Item]], num_processes: int
) -> Generator[tuple[Key, Result]]:
    """Yield every key with the result of `work` on its item.

    `work`, items and results must be picklable; keys stay in this process. The first items are processed here. Close
    the iterator if it is not exhausted. Raises what `work` raises, MegatrainError if a process dies.
    """
    left, taken_bytes = iter(items), 0
    for key, item in left:
        yield key, work(item)
        taken_bytes += len(pickle.dumps(item)) if num_processes > 1 else 0
        if taken_bytes >= ALONE_BYTES:
            break
    else:
        return
    pool = loky.ProcessPoolExecutor(num_processes, initializer=_begin, initargs=(work, os.getpid()))
    in_flight: deque[tuple[list[Key], Future[list[Result]]]] = deque()
    try:
        for keys, batch in _batches(left):
            if len(in_flight) == BATCHES_EACH * num_processes:
                yield from _results(*in_flight.popleft())
            in_flight.append((keys, pool.submit(_run, batch)))
        while in_flight:
            yield from _results(*in_flight.popleft())
    except loky.process_executor.TerminatedWorkerError as error:  # of a result, or of the next submit
        raise MegatrainError(
            "a process that prepares data crashed or was killed, perhaps for want of memory; start again"
        ) from error
    finally:
        pool.shutdown(kill_workers=True)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    begin_child(parent)


def begin_child(parent: int) -> None:
    """Make one of loky's processes end with its parent, and with nothing else that the parent handles."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # loky's processes outlive a parent that is killed
    if os.getppid() != parent:
        os._exit(1)  # it was killed before that call
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes; the parent kills the others
    sys.stdout = sys.stderr  # the parent's output may be read by another program


def _run(batch: list[bytes]) -> list[Any]:
    return [_work(pickle.loads(item)) for item in batch]


def _results(keys: list[Key], results: Future[list[Result]]) -> Iterator[tuple[Key, Result]]:
    try:
        answers = results.result(ANSWER_S)
    except TimeoutError:
        raise MegatrainError(f"a process that prepares data did not answer within {ANSWER_S:.0f} s") from None
    yield from zip(keys, answers, strict=True)


def _batches(items: Iterable[tuple[Key, Item]]) -> Iterator[tuple[list[Key], list[bytes]]]:
    keys: list[Key] = []
    batch: list[bytes] = []
    num_bytes = 0
    for key, item in items:
        keys.append(key)
        batch.append(pickle.dumps(item))
        num_bytes += len(batch[-1])
        if num_bytes >= BATCH_BYTES:
            yield keys, batch
            keys, batch, num_bytes = [], [], 0
    if batch:
        yield keys, batch
