"""Warns if a run is not as its plan predicted: a few times during the training, and at its end."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain_ray.accounting.prediction_check import MIN_STEPS, NEWEST, compare, warning
from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import CLOSE_S, await_thread
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.machine.process_memory import pss_of_run
from megatrain_ray.run.run_history import History

log = logging.getLogger(__name__)


class PlanCheck:
    """Compares the plan of one session with its rows of metrics, and measures the run's host memory once.

    A comparison is made after MIN_STEPS usual steps (all but the first one), after twice as many, and so on, and at the
    end. It warns if other terms are off than at the last comparison. No error in it ends the run.
    """

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._first: Mapping[str, Any] | None = None  # row of the first step, which compiles
        self._newest: deque[Mapping[str, Any]] = deque(maxlen=NEWEST)
        self._num_usual = 0
        self._next = MIN_STEPS
        self._pss_bytes: int | None = None
        self._reported: frozenset[str] = frozenset()  # names of the terms that were off at the last comparison
        self._thread: threading.Thread | None = None

    def ended(self, crew: WorkerGroup, row: Mapping[str, Any]) -> None:
        """Note the row of a step that has ended, and compare if it is time."""
        if self._first is None:
            self._first = row
            return
        self._newest.append(row)
        self._num_usual += 1
        if self._num_usual == 1:
            # A daemon: a driver whose processes have died must still be able to exit.
            pids = dict(crew.pids)
            self._thread = threading.Thread(target=self._measure_memory, args=(pids,), name="memory", daemon=True)
            self._thread.start()
        if self._num_usual >= self._next:
            self._next = 2 * self._num_usual
            self._compare_safely()

    def finish(self, crew: WorkerGroup) -> None:
        """Make the last comparison. Call it after the last step, while the processes still live."""
        if self._thread is not None:
            await_thread(self._thread, crew.check, DEADLINE_S)
        self._compare_safely()

    def close(self) -> None:
        """Stop comparing. Call it when no process answers any more. Idempotent."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _measure_memory(self, pids: Mapping[str, int]) -> None:
        # The kernel visits every page that each process maps, which takes 15 to 40 ms per GiB.
        try:
            self._pss_bytes = sum(sum(kinds.values()) for kinds in pss_of_run(pids).values())
        except (OSError, KeyError) as error:  # one has just died, or belongs to another user
            log.info("host memory was not measured: %s", error)
        else:
            History(self._run_dir).memory(self._pss_bytes)

    def _compare_safely(self) -> None:
        try:
            self._compare()
        except Exception:  # a comparison never ends a run
            log.exception("the plan was not compared with the run")

    def _compare(self) -> None:
        prediction = self._plan.prediction
        if self._first is None or prediction is None:
            return
        found = compare(self._plan, [self._first, *self._newest], self._pss_bytes)
        if found is None:
            return
        off = frozenset(term.name for term in found.off(prediction))
        text = warning(found, prediction, self._run_dir)
        if text and off != self._reported:
            say(f"warning: {text}")
        else:
            log.info("%s", found)
        self._reported = off
