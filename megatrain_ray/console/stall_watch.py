"""Prints what a run waits for when nothing ends, and gives up at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain_ray.console.logs import say
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.errors import DeadlineError

SILENCE_S = 60.0  # seconds in which nothing ends, after which is printed what the run waits for


class StallWatch:
    """Measures how long nothing has ended."""

    def __init__(self, current_phase: Callable[[], str]) -> None:
        """Begin to measure. `current_phase`: returns what the GPU worker is doing."""
        self._current_phase = current_phase
        self.reset()

    def reset(self) -> None:
        """Begin to measure anew, since something has ended."""
        self._since_s = self._reported_s = time.monotonic()

    def check(self, awaited: str, more_s: float) -> None:
        """Print what is awaited if nothing has ended for SILENCE_S seconds, and again after as long.

        Raises DeadlineError if nothing has ended for STEP_DEADLINE_S + `more_s` seconds.
        """
        now_s = time.monotonic()
        if now_s - self._reported_s > SILENCE_S:
            self._reported_s = now_s
            say(f"still waiting for {awaited}: {self._current_phase()}")
        limit_s = STEP_DEADLINE_S + more_s
        if now_s - self._since_s > limit_s:
            raise DeadlineError(f"{awaited} did not end within {limit_s:.0f} s: {self._current_phase()}")
