"""Compares a plan with its run: a few times during the training, in a background thread of the driver."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from megatrain_ray.accounting.measured_file import write_comparison
from megatrain_ray.accounting.prediction_check import MIN_STEPS, Comparison, compare, warning
from megatrain_ray.accounting.work_counters import RunWork, work_between
from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import ANSWER_S, CLOSE_S, await_thread
from megatrain_ray.crew.work_calls import WorkCalls
from megatrain_ray.crew.worker_group import Crew
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.machine.process_memory import pss_of_run

log = logging.getLogger(__name__)

NEWEST = 256  # number of the newest rows, of which medians are taken


class PlanCheck:
    """Compares the plan of one session with what is measured.

    A comparison is made after MIN_STEPS usual steps (all but the first one), after twice as many, and so on, and at the
    end. It warns if other terms are off than at the last comparison. No error in it ends the run.
    """

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._first: Mapping[str, Any] | None = None  # row of the first step, which compiles
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=NEWEST)
        self._num_usual = 0
        self._next = MIN_STEPS
        self._before = WorkCalls((), ())  # asked after the first usual step
        self._done_before: RunWork | None = None
        self._host_bytes: int | None = None
        self._told: frozenset[str] = frozenset()  # names of the terms that were off at the last comparison
        self._thread: threading.Thread | None = None

    def ended(self, crew: Crew, row: Mapping[str, Any]) -> None:
        """Note the row of a step that has ended, and compare if it is time."""
        if self._plan.prediction is None:
            return
        if self._first is None:
            self._first = row
            return
        self._rows.append(row)
        self._num_usual += 1
        if self._num_usual == 1:
            self._before = crew.work()
        elif self._num_usual >= self._next and not self._is_looking:
            self._next = 2 * self._num_usual
            self._look(crew)

    def finish(self, crew: Crew) -> None:
        """Make the last comparison. Call it after the last step, while the processes still live."""
        self._await_look(crew)
        if self._num_usual >= MIN_STEPS:
            self._look(crew, at_end=True)
            self._await_look(crew)

    def close(self) -> None:
        """Stop comparing. Call it when no process answers any more. Idempotent."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _await_look(self, crew: Crew) -> None:
        if self._thread is not None:
            await_thread(self._thread, crew.check, DEADLINE_S)

    @property
    def _is_looking(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _look(self, crew: Crew, *, at_end: bool = False) -> None:
        assert self._first is not None
        arguments = [self._first, *self._rows], crew.work(), dict(crew.pids), at_end
        # A daemon: a driver whose processes have died must still be able to exit.
        self._thread = threading.Thread(target=self._compare, args=arguments, name="plan check", daemon=True)
        self._thread.start()

    def _compare(
        self, rows: Sequence[Mapping[str, Any]], calls: WorkCalls, pids: Mapping[str, int], at_end: bool
    ) -> None:
        try:
            self._done_before = self._done_before or _answers(self._before)
            work = work_between(self._done_before, _answers(calls))
            if self._host_bytes is None:
                self._host_bytes = _host_bytes(pids)
            found = compare(self._plan, rows, work, self._host_bytes)
            if found is not None:
                write_comparison(self._run_dir, found)
                self._tell(found, at_end=at_end)
        except Exception as error:
            log.warning("the plan was not compared with the run", exc_info=error)

    def _tell(self, found: Comparison, *, at_end: bool) -> None:
        prediction = self._plan.prediction
        assert prediction is not None
        off = frozenset(term.name for term in found.off(prediction))
        text = warning(found, prediction, self._plan.step.update_order, self._run_dir)
        if text and (at_end or off != self._told):
            say(f"warning: {text}")
        else:
            log.info("%s", found)
        self._told = off


def _answers(calls: WorkCalls) -> RunWork | None:
    """Return the answers of the processes, or None if one of them has died."""
    with suppress(ray.exceptions.RayError):
        return calls.done(ANSWER_S)
    return None


def _host_bytes(pids: Mapping[str, int]) -> int | None:
    """Return the host memory of all processes of the run, in bytes, or None if it cannot be measured.

    The kernel visits every page that each process maps, which takes 15 to 40 ms per GiB. Training goes on meanwhile.
    """
    start_s = time.perf_counter()
    try:
        total = sum(sum(kinds.values()) for kinds in pss_of_run(pids).values())
    except (OSError, KeyError) as error:  # one has just died, or belongs to another user
        log.info("host memory was not measured: %s", error)
        return None
    log.info("host memory was looked up in %.2f s", time.perf_counter() - start_s)
    return total
