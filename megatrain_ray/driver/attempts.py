"""Makes attempts at a run until one of them ends well."""

from __future__ import annotations

import logging
import platform

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


def train(context: RunContext, manifest: Manifest | None, placement: Placement | None) -> tuple[int, int]:
    """Train, and record the start and its end in the run's history.

    Return the updates of the run so far, and those that remained of earlier starts.
    """
    plan, steps = context.run_spec.plan, context.run.config.train.num_steps
    here = {"host": platform.node(), "hardware": hardware(plan.device), "versions": versions()}
    here["changed"] = context.run.changes_since(manifest)
    # Recorded before anything of the start can fail.
    with History(context.run.path).of_start(manifest.step if manifest else 0, steps, plan.sha256, **here) as end:
        context.callbacks.begin(manifest.step if manifest else 0, steps, context.run)
        completed, first = _train(context, manifest, placement)
        context.callbacks.end(completed)
        end.reason = context.run.early_end(completed)
    return completed, first


def _train(context: RunContext, manifest: Manifest | None, placement: Placement | None) -> tuple[int, int]:
    """Train, and start again from an earlier save if one is damaged, or from the newest after a death.

    placement: holds actors that have started already; used in the first attempt only.
    """
    run, plan = context.run, context.run_spec.plan
    step = first = manifest.step if manifest else 0
    while True:
        aliased = ", host memory aliased" if context.run_spec.is_aliased else ""
        log.info("step %d of %d, %s%s", step, run.config.train.num_steps, plan.device, aliased)
        num_failures = context.failures.count
        try:
            # At the start from 0: the evaluation before the first update is written with step 0.
            with open_sinks(run.config, run.path, step + 1 if step else 0) as sinks:
                return Session(context, manifest, sinks, placement).train(), first
        except DamagedSaveError as damage:
            run.fall_back(step, damage)
        except LostProcessError as death:
            if context.failures.count == num_failures:  # this death has not been counted yet
                context.failures.count += 1
            decision = decide_restart(str(death), context.failures, max(list_saves(run.saves), default=None))
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
