"""Makes attempts at a run until one of them ends well."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.console.logs import say
from megatrain_ray.crew.placement import Placement
from megatrain_ray.crew.recovery import RecoveryAction, decide_restart
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.driver.session import Session
from megatrain_ray.errors import DamagedSaveError, LostProcessError, MegatrainError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import list_saves
from megatrain_ray.machine.environment import hardware, versions
from megatrain_ray.metrics.sinks import open_sinks
from megatrain_ray.run.run_history import History
from megatrain_ray.run.run_processes import await_end

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Holds the result of a training."""

    step: int  # updates of the run so far, those of earlier processes included
    loss: float | None  # of the last update; None if none ran
    run_dir: Path
    # Of metrics.jsonl and evaluations.jsonl, that this process wrote and that were not cut again.
    rows: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()


def train(job: RunContext, manifest: Manifest | None, placement: Placement | None) -> Trained:
    """Train, and record the start and its end in the run's history."""
    plan, steps = job.run_spec.plan, job.run.config.train.steps
    here = {"host": platform.node(), "hardware": hardware(plan.device), "versions": versions()}
    here["changed"] = job.run.changes_since(manifest)
    # Recorded before anything of the start can fail.
    with History(job.run.path).of_start(manifest.step if manifest else 0, steps, plan.sha256, **here):
        return _train(job, manifest, placement)


def _train(job: RunContext, manifest: Manifest | None, placement: Placement | None) -> Trained:
    """Train, and start again from an earlier save if one is damaged, or from the newest after a death.

    placement: holds actors that have started already; used in the first attempt only.
    """
    run, plan = job.run, job.run_spec.plan
    step = first = manifest.step if manifest else 0
    num_evaluations = len(run.evaluations())
    while True:
        aliased = ", host memory aliased" if job.run_spec.is_aliased else ""
        log.info("step %d of %d, %s%s", step, run.config.train.steps, plan.device, aliased)
        num_failures = job.failures.count
        try:
            # At the start from 0: the evaluation before the first update is written with step 0.
            with open_sinks(run.config, run.path, step + 1 if step else 0) as sinks:
                completed, loss = Session(job, manifest, sinks, placement).train()
            rows = [row for row in run.rows() if row["step"] > first]
            return Trained(completed, loss, run.path, rows, run.evaluations()[num_evaluations:])
        except DamagedSaveError as damage:
            run.fall_back(step, damage)
        except LostProcessError as death:
            if job.failures.count == num_failures:  # this death has not been counted yet
                job.failures.count += 1
            decision = decide_restart(str(death), job.failures, max(list_saves(run.saves), default=None))
            if decision.action is RecoveryAction.GIVE_UP:
                raise MegatrainError(decision.why) from None
            say(decision.why)
        placement = None
        await_end(run.path)  # the memory of two crews would not fit
        run.clean_after_end()
        manifest = run.newest_save()
        step = manifest.step if manifest else 0
        first = min(first, step)
        run.begin(plan.to_json(), step)
        num_evaluations = min(num_evaluations, len(run.evaluations()))
