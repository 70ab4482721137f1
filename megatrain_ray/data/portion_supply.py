"""Has the portions of a stream made by a process, before they are needed, while the data process serves batches."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import NamedTuple

from loky.backend.context import get_context

from megatrain_ray.data.stream_folder import PortionId, StreamFolder, StreamSpec
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import CapacityError, MegatrainError
from megatrain_ray.io.batching.portion_stream import PortionFacts, PortionStream
from megatrain_ray.io.records.process_map import begin_child

AGAIN_S = 60.0  # after a failure, such as a bad record, that somebody may mend meanwhile
# The hub's library may keep parts of files in a cache of its own, beside what it fetches: nothing is read twice.
NO_CACHE = {"HF_XET_CHUNK_CACHE_SIZE_BYTES": "0"}
NICENESS = 10  # of the process: it must not delay the updates, which the same CPUs compute


class PortionProcess:
    """Makes portions one after the other in a process, which ends with `close` or with this one."""

    def __init__(self, spec: StreamSpec) -> None:
        """Start the process."""
        context = get_context("loky")  # as for reward functions (rollouts/reward_process.py)
        self._pipe, theirs = context.Pipe()
        arguments, environment = (theirs, os.getpid(), spec), {**NO_CACHE, **spec.environment}
        self._process = context.Process(target=_serve, args=arguments, daemon=True, env=environment)
        self._process.start()
        theirs.close()  # only the child holds this end, so its death ends the pipe

    def begin(self, portion: PortionId) -> None:
        """Begin to make a portion, whose outcome `made` returns."""
        with suppress(OSError):  # it has died, as `made` says
            self._pipe.send(portion)

    def made(self) -> tuple[PortionFacts | None, MegatrainError | None] | None:
        """Return what came of the portion that was begun; None if it is not made yet. Raises EOFError if it died."""
        try:
            return self._pipe.recv() if self._pipe.poll() else None
        except OSError:
            raise EOFError from None

    def close(self) -> int | None:
        """Kill the process, unless it has ended, and return its exit code."""
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)  # loky's processes have no method for it
        self._process.join(DEADLINE_S)
        self._pipe.close()
        code: int | None = self._process.exitcode
        return code


class FailedPortion(NamedTuple):
    """Says why a portion was not made, and when it may be tried again, by the monotonic clock."""

    error: MegatrainError
    again_s: float


class PortionSupply:
    """Has the upcoming portions of a stream's sources made, the most urgent first, and deletes old ones for them."""

    def __init__(self, folder: StreamFolder, streams: Sequence[PortionStream]) -> None:
        """Begin nothing yet. `streams`: of the sources of the folder, in its order."""
        self._failures: dict[PortionId, FailedPortion] = {}
        self._folder = folder
        self._streams = streams
        self._process: PortionProcess | None = None
        self._making: PortionId | None = None
        self._large: set[PortionId] = set()  # portions for which there was too little room beside others

    def poll(self) -> None:
        """Take note of what the process has made. Read the last windows of portions into memory."""
        self._take_outcome()
        for stream in self._streams:
            stream.hold_few()

    def _take_outcome(self) -> None:
        if self._process is None or self._making is None:
            return
        try:
            if (answer := self._process.made()) is None:
                return
            facts, error = answer
        except EOFError:
            code = self.close()
            facts, error = (
                None,
                MegatrainError(
                    f"the process that prepares data died (exit code {code}), perhaps for want of memory; start again"
                ),
            )
        portion, self._making = self._making, None
        self._failures.pop(portion, None)
        if facts is not None:
            self._folder.record(portion, facts, write=False)
            self._large.discard(portion)  # its size is known now
        elif isinstance(error, CapacityError) and portion not in self._large and self._folder.there():
            self._large.add(portion)
        elif error is not None:
            self._failures[portion] = FailedPortion(error, time.monotonic() + AGAIN_S)

    @property
    def failure(self) -> MegatrainError | None:
        """Return why a portion that is needed next was not made; None if all were, or if one is being made."""
        awaited = (PortionId(source, stream.upcoming()[0]) for source, stream in enumerate(self._streams))
        found = (self._failures[portion].error for portion in awaited if portion in self._failures)
        return next(found, None) if self._making is None else None

    def request(self, *, retries: bool) -> None:
        """Begin the most urgent portion that is missing, if none is being made and there is room for it.

        retries: begin also one that failed, if that was long enough ago.
        """
        if self._making is not None:
            return
        upcoming = [[PortionId(source, n) for n in stream.upcoming()] for source, stream in enumerate(self._streams)]
        # A source whose next portion failed needs none after that.
        possible = [list(takewhile(lambda portion: self._may_try(portion, retries), portions)) for portions in upcoming]
        by_urgency = [portions[rank] for rank in range(2) for portions in possible if rank < len(portions)]
        current = {portions[0] for portions in upcoming}
        for portion in by_urgency:
            if self._folder.is_there(portion):
                continue
            is_awaited = portion in current  # then it is made whatever the room, which it checks itself
            keep = current if is_awaited else {*current, *by_urgency}
            if self._folder.make_room(self._needed_bytes(portion), keep) or is_awaited:
                self._process = self._process or PortionProcess(self._folder.spec)
                self._process.begin(portion)
                self._making = portion
                return

    def _may_try(self, portion: PortionId, retries: bool) -> bool:
        failure = self._failures.get(portion)
        return failure is None or (retries and time.monotonic() >= failure.again_s)

    def _needed_bytes(self, portion: PortionId) -> int:
        return self._folder.spec.limit if portion in self._large else self._folder.needed_bytes(portion)

    def close(self) -> int | None:
        """End the process, if there is one, and return its exit code. Idempotent."""
        process, self._process = self._process, None
        return process.close() if process else None


def _serve(pipe: Connection, parent: int, spec: StreamSpec) -> None:
    begin_child(parent)
    os.nice(NICENESS)
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from megatrain_ray.data.make_portion import make_portion  # which the data process does without

    disable_progress_bars()
    folder = StreamFolder(spec)
    while True:
        try:
            portion = pipe.recv()
        except EOFError:
            return
        facts, error = None, None
        try:
            facts = make_portion(folder, portion, lambda line: print(line, file=sys.stderr))
        except MegatrainError as known:
            error = known
        except Exception as unknown:
            error = MegatrainError(f"{folder.describe(portion)}: {type(unknown).__name__}: {unknown}")
        pipe.send((facts, error))
