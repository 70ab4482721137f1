"""Copies the saves of a run into an object store by a thread, while training goes on.

The mirror has the files of the run's directory under the same names, and mirror.json, which says whose it is. A save is
there once its manifest is, which is written last. So a kill at any moment leaves the saves that were there before.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.console.logs import say
from megatrain_ray.errors import CapacityError, ConfigError, MegatrainError
from megatrain_ray.io.files.owned_folder import MARK_NAME
from megatrain_ray.io.saves.manifest import BlobEntry, Manifest
from megatrain_ray.io.saves.mirrored_saves import (
    commit_mirrored,
    delete_mirrored,
    mirrored_steps,
    missing_blobs,
    upload_blobs,
)
from megatrain_ray.io.saves.save_folder import list_saves, load_manifest, save_folder
from megatrain_ray.io.storage.object_store import ObjectStore, ObjectStoreError
from megatrain_ray.run.fetch_run import FILES, FOLDERS, OWNER_NAME, ROLLOUTS, check_owner, is_mirrored, reading_mirror
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.units import format_bytes

log = logging.getLogger(__name__)

Result = TypeVar("Result")
ROLLOUT = re.compile(rf"{ROLLOUTS}/step_(\d+)\.jsonl")

# Seconds between the tries to write an object, each of which has the library's own retries: four minutes in all.
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
UPLOADS = 3  # tries to upload the blobs of a save that the store has lost before its manifest was written
# An upload's threads have a priority lower by so much. On a core that they want, updates of the optimizer were 5 to 20
# times as slow without, 1.5 to 3 times with it. At 19 one that held Python's lock had no core for 2.7 s.
NICE = 10
POLL_S = 0.2
SILENT_S = 3.0  # seconds after which the end of a run says that it waits
REPORT_S = 30.0  # seconds between two lines while the end of a run waits for the mirror


class _StoppedError(Exception):
    """Ends an upload because the run has ended at once."""


class SaveMirror:
    """Uploads the newest save of a run, then older ones that are kept, one at a time. Made by `mirroring`."""

    def __init__(self, run: RunDir, store: ObjectStore) -> None:
        """Look at what is in the mirror. Raises ConfigError if it is another run's, ObjectStoreError."""
        self.url = store.url
        self.uploading: int | None = None  # the step of a save that must not be deleted now
        self._run, self._store = run, store
        found = store.find()
        self._there = set(mirrored_steps(found))
        self._names = {item.name for item in found}
        self._is_claimed = check_owner(store, self._names, run.token)
        self._sent_files: dict[Path, tuple[int, int]] = {}  # sizes and times of change
        self._sent_bytes: dict[str, int] = {}  # of the blobs of the save that is being uploaded
        self._total_bytes = 0
        self._problem: str | None = None
        self._failure: str | None = None  # of the last request to the store, if it failed
        self._reported: int | None = None  # the upload that was reported as late
        self._writes = threading.Condition()  # notified when a save begins or is written
        self._being_written: int | None = None  # the step of the save that is being written now
        self._awaited: int | None = None  # the step of the save for which the upload under way waits, or has waited
        self._wake, self._ending, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="save mirror", daemon=True)

    def start(self) -> None:
        """Start to upload what is missing, once the run's directory holds the run. Raises ConfigError."""
        if self._thread.ident is not None:
            return
        with reading_mirror():
            self._claim()
        self._wake.set()
        self._thread.start()

    def saved(self, step: int) -> None:
        """Upload a new save as soon as the one under way is there."""
        late = self.uploading
        if late not in (None, step, self._reported):
            self._reported = late
            say(f"save_mirror: the save of step {step} is made, and {self._progress()}: the mirror lags behind")
        self._wake.set()

    def writing(self, step: int | None) -> None:
        """Let the upload under way wait while the save of this step is being written. None: no save is.

        The optimizer's updates wait for a save, and an upload's reads take the disk from it.
        """
        # 2.2 GB/s of writes became 0.8 beside 1.25 GB/s of reads; `ionice` changed nothing (benchmarks/history.md).
        with self._writes:
            self._being_written = step
            self._writes.notify_all()

    def lag(self, step: int) -> int:
        """Return how many of the first `step` updates would be lost if this machine were."""
        return step - max(self._there, default=0)

    def finish(self) -> None:
        """Wait until nothing is left to upload. Raises MegatrainError if it could not be uploaded."""
        self._ending.set()
        self._wake.set()
        self.writing(None)
        reported_s = time.monotonic() - REPORT_S + SILENT_S
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            if time.monotonic() - reported_s > REPORT_S:
                reported_s = time.monotonic()
                say(f"waiting for save_mirror: {self._progress()}")
        if self._problem:
            raise MegatrainError(
                f"save_mirror: the newest save is not in {self.url}: {self._problem}; {self._run.saves} has it, and "
                "the same command uploads it"
            )

    def close(self) -> None:
        """Stop an upload under way."""
        self._stop.set()
        self._wake.set()
        self.writing(None)
        if self._thread.is_alive():
            self._thread.join(REPORT_S)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            is_last = self._ending.is_set()  # read before the saves: none is made after it is set
            try:
                self._upload_all()
                if is_last and self._there:  # rows of evaluations may be newer than the last save
                    self._upload_files()
                self._problem = None
            except _StoppedError:
                return
            except Exception as error:  # nothing but `finish` and the next save can answer it
                self._problem = str(error)
                expected = isinstance(error, (MegatrainError, OSError))
                log.warning("save_mirror: %s", self._problem, exc_info=None if expected else error)
                if not is_last:
                    say(f"warning: save_mirror: {error}; the next save is tried again")
            finally:
                self.uploading = None
            if is_last:
                return

    def _upload_all(self) -> None:
        while (step := self._next()) is not None:
            self.uploading = step
            try:
                self._upload(step)
            except (OSError, MegatrainError):
                if step in list_saves(self._run.saves):
                    raise
                log.info("the save of step %d was deleted before it was in the mirror", step)

    def _next(self) -> int | None:
        there = list_saves(self._run.saves)
        wanted = {*there[-1:], *self._run.kept_for_ever(there)} - self._there
        return max(wanted, default=None)

    def _upload(self, step: int) -> None:
        start_s = time.monotonic()
        folder, manifest = save_folder(self._run.saves, step), load_manifest(self._run.saves, step)
        self._awaited = None
        self._sent_bytes, self._total_bytes = {}, sum(blob.nbytes for blob in manifest.blobs())
        blobs = list(manifest.blobs())
        for _ in range(UPLOADS):
            upload_blobs(self._store, folder, step, blobs, self._retried, self._advance)
            self._upload_files()
            blobs = self._lost(manifest)
            if not blobs:
                break
            log.warning("save_mirror: %d blobs of the save of step %d are not in the store", len(blobs), step)
        else:
            raise ObjectStoreError(f"{self.url} has lost {blobs[0].name} of the save of step {step}")
        self._retried(partial(commit_mirrored, self._store, folder, step))
        self._there.add(step)
        self._prune(manifest)
        seconds = time.monotonic() - start_s
        rate = f"{format_bytes(round(self._total_bytes / seconds))}/s"
        log.info("mirrored the save of step %d: %s in %.1f s, %s", step, format_bytes(self._total_bytes), seconds, rate)

    def _lost(self, manifest: Manifest) -> list[BlobEntry]:
        """Return the blobs of a save that are not in the mirror. Other files that it has lost are uploaded again.

        A server that died may come back without what it had confirmed. A manifest must not vouch for that.
        """
        found = self._retried(self._store.find)
        self._there, self._names = set(mirrored_steps(found)), {item.name for item in found}
        sent = {OWNER_NAME, *(self._name(file) for file in self._sent_files)}
        if not sent <= self._names:
            self._is_claimed = False
            self._sent_files.clear()
            self._retried(self._claim)
            self._upload_files()
        return self._retried(partial(missing_blobs, self._store, found, manifest))

    def _name(self, file: Path) -> str:
        return file.relative_to(self._run.path).as_posix()

    def _upload_files(self) -> None:
        """Upload the files of the run's directory that go with a save, as far as they have changed."""
        for file in self._files():
            stats = file.stat()
            state = stats.st_size, stats.st_mtime_ns
            if self._sent_files.get(file) != state:
                self._retried(partial(self._store.upload, file, self._name(file)))
                self._names.add(self._name(file))
                self._sent_files[file] = state

    def _files(self) -> Iterator[Path]:
        for pattern in (*FILES, *(f"{folder}/**/*" for folder in (*FOLDERS, ROLLOUTS))):
            for file in sorted(self._run.path.glob(pattern)):
                if file.is_file() and file.name != MARK_NAME and is_mirrored(self._name(file)):
                    yield file

    def _prune(self, newest: Manifest) -> None:
        """Delete the saves of the mirror that the run's directory would not keep."""
        older = sorted(step for step in self._there if step <= newest.step)
        kept = {*older[-self._run.config.save_keep :], *self._run.kept_for_ever(older)}
        for step in (step for step in older if step not in kept):
            self._retried(partial(delete_mirrored, self._store, step))
            self._there.discard(step)
        self._prune_rollouts()

    def _prune_rollouts(self) -> None:
        """Delete the rollouts that the run's directory has deleted, and that no save of the mirror learns from next."""
        files = {int(match[1]): match[0] for match in map(ROLLOUT.fullmatch, self._names) if match}
        needed = {max((first for first in files if first <= step), default=None) for step in self._there}
        for first, name in files.items():
            if first not in needed and not (self._run.path / name).exists():
                self._retried(partial(self._store.delete, name))
                self._names.discard(name)
                self._sent_files.pop(self._run.path / name, None)

    def _retried(self, action: Callable[[], Result]) -> Result:
        """Call the function until it succeeds. Raises ObjectStoreError after the last of a bounded number of tries."""
        pauses = iter(PAUSES_S)
        while True:
            try:
                result = action()
            except ObjectStoreError as error:
                self._failure = str(error)
                if (pause_s := next(pauses, None)) is None:
                    raise
                log.warning("save_mirror: tried again in %.0f s: %s", pause_s, self._failure)
                if self._stop.wait(pause_s):
                    raise _StoppedError from None
            else:
                self._failure = None
                return result

    def _advance(self, blob: str, num_bytes: int) -> None:
        """Note how much of a blob is uploaded, and wait while a save is being written.

        An upload waits for one save only, so that saves which follow each other without a gap do not hold it up.
        No request is open meanwhile: the parts of an object are requests of their own.
        """
        self._sent_bytes[blob] = num_bytes
        with self._writes:
            if self._awaited is None:
                self._awaited = self._being_written
            self._writes.wait_for(lambda: self._being_written is None or self._being_written != self._awaited)
        if self._stop.is_set():
            raise _StoppedError

    def _progress(self) -> str:
        if self._failure:
            return f"an upload is tried again: {self._failure}"
        if self.uploading is None:
            return "the last rows are sent"
        sent, total = sum(self._sent_bytes.copy().values()), self._total_bytes
        return f"{sent / max(1, total):.0%} of the save of step {self.uploading} ({format_bytes(total)}) is sent"

    def _claim(self) -> None:
        """Write whose mirror it is, which also shows at once whether anything can be written there."""
        if not self._is_claimed:
            owner = {"made_by": "megatrain-ray", "run": self._run.token}
            self._store.write(OWNER_NAME, json.dumps(owner).encode())
            self._is_claimed = True


@contextmanager
def mirroring(run: RunDir) -> Iterator[SaveMirror | None]:
    """Yield the mirror of a run, not started; None if it has none. At the end of the block wait for what is missing.

    Raises ConfigError if the mirror cannot be read or is another run's, MegatrainError as `SaveMirror.finish`.
    """
    if run.config.save_mirror is None:
        yield None
        return
    with reading_mirror():
        mirror = SaveMirror(run, ObjectStore(StoreUrl.parse(run.config.save_mirror)))
    try:
        if run.holds_run and run.has_begun:
            mirror.start()
        yield mirror
    except (ConfigError, CapacityError):  # of the start: it is tried again soon
        raise
    except Exception:
        try:
            mirror.finish()
        except MegatrainError as late:
            say(f"warning: {late}")
        raise
    else:
        mirror.finish()
    finally:
        mirror.close()
