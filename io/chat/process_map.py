"""Maps a function over many items in several processes, with results in the order of the items.

The processes are plain children that communicate over their pipes. Those of multiprocessing import the program that
starts them once more, which fails for a script without `if __name__ == "__main__"`. Forked ones would inherit the locks
of a tokenizer's threads.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from megatrain_ray.errors import MegatrainError

ALONE_BYTES = 2 << 20  # pickled items processed here before processes are started, which take 2 s to the first result
BATCH_BYTES = 1 << 18  # size at which a batch of pickled items is complete
ANSWER_S = 600.0  # bound on one batch, which takes milliseconds
BATCHES_EACH = 2  # batches per process that are in flight, or done with results not yet yielded

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


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
    with _Processes[Item, Result](work, num_processes) as processes:
        yield from processes.map(left)


class _Processes(Generic[Item, Result]):
    """Runs the work in child processes, which are killed when the block ends, even in the middle of a batch."""

    def __init__(self, work: Callable[[Item], Result], number: int) -> None:
        self._number = number
        self._work = pickle.dumps(work)
        self._processes: list[_Process[Result]] = []
        self._idle: SimpleQueue[_Process[Result]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="map")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def map(self, items: Iterable[tuple[Key, Item]]) -> Iterator[tuple[Key, Result]]:
        under_way: deque[tuple[list[Key], Future[list[Result]]]] = deque()
        for keys, batch in _batches(items):
            if len(under_way) == BATCHES_EACH * self._number:
                yield from _taken(under_way)
            if len(self._processes) < self._number:
                self._processes.append(_Process(self._work))
                self._idle.put(self._processes[-1])
            under_way.append((keys, self._threads.submit(self._run, batch)))
        while under_way:
            yield from _taken(under_way)

    def _run(self, batch: list[bytes]) -> list[Result]:
        process = self._idle.get()
        try:
            return process.ask(batch)
        finally:  # a dead process is returned too, or the next batch would wait forever
            self._idle.put(process)


class _Process(Generic[Result]):
    """Runs one child process that answers each batch with its results."""

    def __init__(self, work: bytes) -> None:
        self._unsent = work
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        # In a process group of its own, so that only the parent receives an interrupt from the terminal.
        self._child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )

    def ask(self, batch: list[bytes]) -> list[Result]:
        """Return the results of a batch. Raises what the work raises, MegatrainError if the child is gone.

        A child that does not answer within ANSWER_S is killed.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        too_late = threading.Timer(ANSWER_S, self._child.kill)
        too_late.daemon = True
        too_late.start()
        try:
            self._child.stdin.write(self._unsent + pickle.dumps(batch))
            self._unsent = b""
            self._child.stdin.flush()
            answer = pickle.load(self._child.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._child.wait()
            raise MegatrainError(
                f"a process that prepares data ended with {code} (-9: killed, perhaps for want of memory); start again"
            ) from None
        finally:
            too_late.cancel()
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        """Wait for the child to exit. Call `kill` first."""
        with suppress(BrokenPipeError):  # a request was still unwritten
            self._child.communicate()


def serve() -> None:
    """Run the loop of a child: read a function, then lists of items, and answer each list until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # anything that the work prints must not get into the answers
    with suppress(EOFError):
        work = pickle.load(requests)
        while True:
            answers.write(pickle.dumps(_answer(work, pickle.load(requests))))
            answers.flush()


def _answer(work: Callable[[Any], Any], items: list[bytes]) -> list[Any] | Exception:
    try:
        return [work(pickle.loads(item)) for item in items]
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


def _taken(under_way: deque[tuple[list[Key], Future[list[Result]]]]) -> Iterator[tuple[Key, Result]]:
    keys, results = under_way.popleft()
    yield from zip(keys, results.result(), strict=True)


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
