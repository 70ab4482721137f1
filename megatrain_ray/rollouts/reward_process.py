"""Runs reward functions in a process of their own, which may crash or hang without taking the run with it."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from loky.backend.context import get_context

from megatrain_ray.config.train_groups import RolloutsConfig
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import ConfigError, DeadlineError, MegatrainError
from megatrain_ray.io.chat.conversation_formats import LARGEST_NUMBER
from megatrain_ray.io.records.process_map import begin_child
from megatrain_ray.rollouts.reward_functions import find_rewards

START_S = 120.0  # for imports of a user's modules

Scores = dict[str, list[float | None]]  # of all completions, by function


class RewardProcess:
    """Holds the process. It ends with `close`, or with the driver."""

    def __init__(self, rewards: Sequence[str | Mapping[str, str]], limit_s: float) -> None:
        """Start the process and wait until it has found the functions. Raises ConfigError as find_rewards.

        rewards: as train.rollouts.rewards.
        limit_s: seconds that all functions together may take for one `ask`.
        """
        self._limit_s = limit_s
        self._deadline_s = 0.0
        self._num_asked = 0
        # Loky's processes do not import the program that starts them once more (io/records/process_map.py).
        context = get_context("loky")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid(), [*rewards]), daemon=True)
        self._process.start()
        theirs.close()  # only the child holds this end, so its death ends the pipe
        self._deadline_s = time.monotonic() + START_S
        try:
            names = self.answer(START_S)
        except DeadlineError:
            self.close()
            raise ConfigError(
                f"train.rollouts.rewards: no functions after {START_S:.0f} s: what do modules do?"
            ) from None
        except BaseException:
            self.close()
            raise
        assert names is not None
        self.names = tuple(names)

    def ask(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """Begin to compute the rewards of completions, which `answer` returns. Rewards of earlier calls are discarded.

        columns: further columns of the records, each as long as `completions`.
        """
        self._deadline_s = time.monotonic() + self._limit_s
        self._num_asked += 1
        with suppress(OSError):  # it has died, as `answer` says
            given = {"prompts": [*prompts], "completions": [*completions]}
            self._pipe.send((self._num_asked, given, dict(columns)))

    def answer(self, wait_s: float) -> Scores | None:
        """Return the rewards by function, or None if they do not come within `wait_s`.

        Raises MegatrainError if a function fails or its process dies, DeadlineError if they take too long.
        """
        try:
            if not self._pipe.poll(wait_s):
                if time.monotonic() > self._deadline_s:
                    raise DeadlineError(
                        f"reward functions took longer than train.rollouts.timeout_s: {self._limit_s:g}; mend them or "
                        "raise it"
                    )
                return None
            number, error, found = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if number != self._num_asked:  # of an attempt at the run that a death has ended
            return None
        if error is not None:
            raise error
        scores: Scores = found
        return scores

    def _died(self) -> MegatrainError:
        self._process.join(DEADLINE_S)
        return MegatrainError(
            f"the process of the reward functions died (exit code {self._process.exitcode}); mend the functions"
        )

    def close(self) -> None:
        """Kill the process. Idempotent."""
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)  # loky's processes have no method for it
        self._process.join(DEADLINE_S)
        self._pipe.close()


def check_rewards(settings: RolloutsConfig) -> None:
    """Raise ConfigError as RewardProcess if a function is not there."""
    RewardProcess(settings.rewards, settings.timeout_s).close()


def _serve(pipe: Connection, parent: int, rewards: list[str | Mapping[str, str]]) -> None:
    begin_child(parent)
    try:
        functions = find_rewards(rewards)
    except ConfigError as error:
        pipe.send((0, error, None))
        return
    pipe.send((0, None, dict.fromkeys(functions)))
    while True:
        try:
            number, given, columns = pipe.recv()
        except EOFError:
            return
        pipe.send((number, *_scored(functions, given, columns)))


def _scored(functions: Mapping[str, Any], given: dict[str, list[Any]], columns: dict[str, list[Any]]) -> Any:
    found: Scores = {}
    for name, function in functions.items():
        try:
            found[name] = _checked(function(**given, **columns), len(given["completions"]))
        except (Exception, SystemExit) as error:
            lines = [line for line in traceback.extract_tb(error.__traceback__) if line.filename != __file__]
            where = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
            return MegatrainError(
                f"the reward function {name} failed: {type(error).__name__}: {error}{where}; mend it or the records"
            ), None
    return None, found


def _checked(scores: Any, count: int) -> list[float | None]:
    values = [None if score is None else float(score) for score in scores]
    if len(values) != count:
        raise ValueError(f"expected {count} numbers, one for each completion, got {len(values)}")
    if bad := [value for value in values if value is not None and not abs(value) <= LARGEST_NUMBER]:
        raise ValueError(f"expected None or finite numbers of at most {LARGEST_NUMBER:g}, got {bad[0]}")
    return values
