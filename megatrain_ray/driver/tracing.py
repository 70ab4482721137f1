"""Writes a timeline of the traced steps: collects the spans of all processes in a background thread of the driver."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import ray

from megatrain_ray.accounting.trace_file import TracedProcess, trace_path, write_trace
from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import CLOSE_S, await_thread
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.engine.device.deadlines import DEADLINE_S, STEP_DEADLINE_S
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.spans import SpanLog, traced_steps

log = logging.getLogger(__name__)


class Tracing:
    """Collects the spans of a run and writes its timeline. No error in it ends the run."""

    def __init__(self, run_spec: RunSpec, run_dir: Path, completed: int) -> None:
        """Prepare to trace the steps that log.trace names, except the first `completed` ones of the run."""
        steps = traced_steps(run_spec.config.log.trace)
        self._steps = range(max(steps.start, completed + 1), steps.stop)
        self._run_spec = run_spec
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None
        self.spans = SpanLog()
        self._watch(completed)

    def ended(self, crew: WorkerGroup, step: int) -> None:
        """Collect spans if the last traced step has ended. Call it after every step."""
        if step in self._steps and step == self._steps[-1]:
            self._collect(crew, step)
        self._watch(step)

    def finish(self, crew: WorkerGroup, completed: int) -> None:
        """Write the spans of traced steps that were cut short, and wait for the file, while processes still live."""
        if self._thread is None and completed in self._steps:
            self._collect(crew, completed)
        if self._thread is not None:
            await_thread(self._thread, crew.check, self._limit_s)

    def close(self) -> None:
        """Stop tracing. Call it when no process answers any more. Idempotent."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    @property
    def _limit_s(self) -> float:
        """Return the bound of an answer, in seconds: a process answers when step and update are over."""
        return STEP_DEADLINE_S + self._run_spec.plan.update_deadline_s + DEADLINE_S

    def _watch(self, completed: int) -> None:
        self.spans.on = completed + 1 in self._steps

    def _collect(self, crew: WorkerGroup, last: int) -> None:
        calls = crew.spans(last)
        # A daemon: a driver whose processes have died must still be able to exit.
        self._thread = threading.Thread(target=self._write, args=(calls, last), name="trace", daemon=True)
        self._thread.start()

    def _write(self, calls: dict[str, Any], last: int) -> None:
        try:
            found = [self._answer(name, call) for name, call in calls.items()]
            processes = [*filter(None, found), TracedProcess("driver", self.spans.take())]
            path = trace_path(self._run_dir, self._steps[0], last)
            path = write_trace(path, processes, [layer.name for layer in self._run_spec.plan.layers])
        except Exception as error:
            log.warning("no trace", exc_info=error)
            say(f"warning: the trace was not written ({type(error).__name__}: {error}); the training goes on")
            return
        say(f"traced steps {self._steps[0]} to {last}: {path} (open it at https://ui.perfetto.dev)")

    def _answer(self, name: str, call: Any) -> TracedProcess | None:
        """Return the spans of a process, or None if it has died."""
        try:
            return TracedProcess(name, ray.get(call, timeout=self._limit_s))
        except ray.exceptions.RayError as error:
            log.warning("the trace is without the spans of %s: %s", name, error)
            return None
