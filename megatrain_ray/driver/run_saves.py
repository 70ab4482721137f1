"""Begins, commits and abandons the saves of one attempt at a run, and checks before whether they will have room."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ray.exceptions import RayActorError, RayTaskError

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.console.logs import say
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.policy import RunPolicy
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.driver.running_save import RunningSave
from megatrain_ray.engine.measure.save_cost import predict_stall_s
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import CapacityError, MegatrainError
from megatrain_ray.io.files.disk_errors import check_room, explained
from megatrain_ray.io.files.owned_folder import FolderKind, OwnedFolder
from megatrain_ray.io.files.partial_folder import remove_abandoned
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import list_saves, save_room, why_kept, write_part
from megatrain_ray.io.saves.save_writer import NonFiniteStateError, Piece
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.spans import Row, SpanLog
from megatrain_ray.workers.messages import Progress

log = logging.getLogger(__name__)

PROBE_VALUES = 4 << 20  # 16 MiB
PROBE_BUFFERS = 16
ADVICE = "free some, lower save_keep, choose another run_dir, or set save_every: null to train without saves"


class SaveRates(NamedTuple):
    """Holds the rates from which the stall of a save is predicted. That of the disk is 0 if nothing is saved."""

    disk_bytes_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0


def check_save_room(run_spec: RunSpec, saves: Path, step: int, run: str | None = None) -> None:
    """Raise CapacityError unless all saves that will exist at the same time have room.

    Call it before the first step after `step`. `run`: the token of the run; other saves are never deleted.
    """
    config = run_spec.config
    # One more than is kept, since the newest is written before the oldest is deleted.
    every = config.save_keep_every
    there = [saved for saved in list_saves(saves) if not every or saved % every]
    num_there = sum(why_kept(saves, saved, run) is None for saved in there)
    kept_for_ever = _num_multiples(step, config.train.num_steps, every)
    together = min(
        num_saves_to_come(RunPolicy.of(config), step),
        kept_for_ever + max(1, config.save_keep + config.save_best + (config.save_mirror is not None) + 1 - num_there),
    )
    what = "the save" if together == 1 else f"{together} saves"
    check_room(saves, together * bytes_of_one(run_spec.plan), what, ADVICE)


def num_saves_to_come(policy: RunPolicy, step: int) -> int:
    """Return how many saves a run makes after `step`, if it is not interrupted."""
    last, intervals = policy.steps, policy.save_intervals
    common = math.lcm(*intervals) if len(intervals) > 1 else None
    num_between = sum(_num_multiples(step, last - 1, every) for every in intervals) - _num_multiples(
        step, last - 1, common
    )
    return num_between + (step < last)


def _num_multiples(first: int, last: int, every: int | None) -> int:
    """Return how many multiples of `every` are more than `first` and at most `last`; 0 if it is None."""
    return max(0, last // every - first // every) if every else 0


def bytes_of_one(plan: Plan) -> int:
    """Return the most bytes that one save takes on disk."""
    return save_room(plan.save_bytes, len(plan.layers), plan.num_parts)


def measure_disk(saves: Path, num_bytes: int, compression: SaveCompression) -> float:
    """Return how many bytes of state a second can be saved in the folder `saves`, by writing at most 256 MiB there."""
    count = max(1, min(num_bytes // 4, PROBE_VALUES))
    values = np.random.default_rng(0).standard_normal(count, np.float32)  # random: compresses as little as state does
    buffers = [values.data.cast("B")] * min(PROBE_BUFFERS, max(1, num_bytes // values.nbytes))
    piece = Piece("probe", "probe", 0, len(buffers) * count, buffers)
    saves.mkdir(exist_ok=True)
    remove_abandoned(saves)
    with explained("write to", saves):
        probe = OwnedFolder.make(saves / f".probe_{secrets.token_hex(4)}.partial", FolderKind.PARTIAL)
    start_s = time.monotonic()
    try:
        asyncio.run(write_part(probe.path, 0, [piece], compression=compression))
        return len(buffers) * values.nbytes / (time.monotonic() - start_s)
    finally:
        probe.remove()


class RunSaves:
    """Tracks the newest save of a run, and the one that is being written."""

    def __init__(self, context: RunContext, crew: WorkerGroup, manifest: Manifest | None, spans: SpanLog) -> None:
        """Prepare to save. `manifest`: of the save that the attempt goes on from; None: there is none."""
        self._context = context
        self._crew = crew
        self._spans = spans
        self.step = manifest.step if manifest else -1  # updates in the newest save; -1: there is none
        self.num_applied = manifest.optimizer_step if manifest else 0  # those of them that changed the weights
        self.running: RunningSave | None = None
        self.missed = False  # the last save that was begun was abandoned
        self.rates = SaveRates()  # set before the first save
        self._has_reported_wait = False

    def begin(self, step: int, completed: int, last_row: Mapping[str, Any]) -> None:
        """Begin the save of a step, which may not have run yet. Raises MegatrainError if there is no room for it.

        last_row: of metrics; empty: no step has ended.
        """
        run_spec, predicted_s = self._context.run_spec, 0.0
        if completed < step < run_spec.config.train.num_steps and last_row:
            predicted_s = predict_stall_s(run_spec.plan, last_row["step_s"], *self.rates)
        try:
            check_room(self._context.run.saves, bytes_of_one(run_spec.plan), f"the save of step {step}", ADVICE)
            self.running = RunningSave(self._context, self._crew, step, predicted_s)
        except CapacityError as error:  # exit code 1, since the configuration is not at fault
            raise MegatrainError(f"{error}; {self.safe}, and the same command resumes") from None
        if self._context.mirror:
            self._context.mirror.writing(step)
        self.missed = self._context.callbacks.save = False

    def reached(self, progress: Progress) -> None:
        """Tell the running save where training stands, if it is the save of this step."""
        if self.running and self.running.step == progress.step:
            self.running.reached(progress)

    def take_part(self, call: Any) -> None:
        """Take a part of the running save, which a shard has written.

        If the shard died meanwhile, the save is abandoned and made again later. Raises MegatrainError if the state is
        not finite, and what the shard raised.
        """
        save = self.running
        if save is None or call not in save.calls:
            return
        try:
            save.add_result(call)
        except RayActorError as error:
            self._crew.recover(error)
            self._abandon(save)
            self.missed = True
            say(f"the save of step {save.step} was abandoned; the next one follows with the next step")
        except RayTaskError as error:
            self._abandon(save)
            if isinstance(error.cause, NonFiniteStateError):
                raise MegatrainError(
                    f"step {save.step} cannot be saved: {error.cause}, so training has diverged; {self.safe}: lower "
                    "train.lr, and the same command resumes"
                ) from None
            raise

    def _abandon(self, save: RunningSave) -> None:
        self.end()
        save.abandon()

    def end(self) -> None:
        """Forget the running save, if there is one. Uploads of the mirror need not wait for it any more."""
        self.running = None
        if self._context.mirror:
            self._context.mirror.writing(None)

    def commit_complete(self, completed: int) -> None:
        """Commit the running save if it is complete. If all steps since the newest one were skipped, drop it."""
        save = self.running
        if save is None or not save.complete:
            return
        if save.num_updates <= self.num_applied:
            self._abandon(save)
            log.info("step %d is not saved: no step since the newest save changed the weights", save.step)
            return
        self._context.run.flush()  # a save never exists without the rows before it
        with self._spans.span(Row.DRIVER, f"commit save {save.step}"):
            timing = save.commit()
        self.step, self.num_applied = save.step, save.num_updates
        self.end()
        log.info("saved step %d: %s", save.step, timing)
        if self._context.mirror:
            self._context.mirror.saved(save.step)
        self._context.callbacks.saved(save.step)
        if save.waited_s and completed < self._context.run_spec.config.train.num_steps:
            tell = log.info if self._has_reported_wait else say
            tell(
                f"the next save was due before that of step {save.step} was written ({timing.write_s:.1f} s): training "
                f"waited {save.waited_s:.1f} s for it; a larger save_every avoids that"
            )
            self._has_reported_wait = True

    @property
    def safe(self) -> str:
        """Return from where a run that fails can go on, for the message."""
        return f"the save of step {self.step} is intact" if self.step >= 0 else "there is no save yet"

    def kept(self, completed: int) -> str:
        """Return what a run that is interrupted after so many steps leaves, for the message."""
        if self.step == completed:
            return f"saved at step {self.step}; the same command resumes"
        if self._context.run_spec.config.save_every is None:
            return "nothing saved (save_every: null)"
        if self.step >= 0:
            return f"all steps since the save of step {self.step} were skipped; the same command resumes from it"
        return "nothing saved; the same command resumes"
