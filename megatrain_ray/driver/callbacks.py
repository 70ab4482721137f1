"""Calls the callbacks of Transformers' Trainer that a program has given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_ray.console.logs import say
from megatrain_ray.errors import ConfigError
from megatrain_ray.metrics.sink import flat_numbers
from megatrain_ray.run.run_files import RunFiles

# What on_log is given, by the names that Transformers has for it, and the keys of a row of metrics.
LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "epoch": "epoch",
    "tokens_per_s": "tokens_per_s",
}
Row = Mapping[str, Any]  # of metrics.jsonl or evaluations.jsonl
EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


class Callbacks:
    """Calls transformers.TrainerCallback objects on the driver, with a TrainerState and a TrainerControl.

    Only `EVENTS` are called. Each step is logged. An exception of a callback ends the run.

    stop: a callback has set control.should_training_stop.
    save, evaluate: a callback has set control.should_save or should_evaluate, which the driver has not done yet.
    """

    def __init__(self, callbacks: Sequence[Any] = (), args: Any = None, **objects: Any) -> None:
        """Take callbacks or their classes. `args` and `objects` are passed to each call, as Transformers does.

        Raises ConfigError for other objects. Without callbacks Transformers is not imported.
        """
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self._args = args
        self._objects = objects
        self.save = self.evaluate = False
        if self._callbacks:
            from transformers import TrainerCallback, TrainerControl, TrainerState

            self._state, self._control = TrainerState(), TrainerControl()
            for callback in self._callbacks:
                _check(callback, TrainerCallback)

    @property
    def stop(self) -> bool:
        return bool(self._callbacks) and self._control.should_training_stop

    def begin(self, step: int, steps: int, run: RunFiles) -> None:
        """Call on_train_begin, before the first step after `step` of `steps`.

        run: holds the rows of the steps so far. The state begins with them, as in Transformers' Trainer.
        """
        if not self._callbacks:
            return
        rows, evaluations = run.rows(), run.evaluations()
        self._control.should_training_stop = False
        self._state = type(self._state)(max_steps=steps)
        made = [(row, _logs(row)) for row in rows] + [(row, dict(flat_numbers(row))) for row in evaluations]
        self._state.log_history = [{**numbers, "step": row["step"]} for row, numbers in sorted(made, key=_step_of)]
        for row in evaluations:
            self._compare(row)
        self._call("on_train_begin", step, rows[-1] if rows else None)

    def step_ended(self, row: Row) -> None:
        """Call on_step_end and on_log. `row`: of metrics."""
        self._call("on_step_end", row["step"], row)
        self._call("on_log", row["step"], row, logs=_logs(row))

    def evaluated(self, row: Row) -> None:
        """Call on_evaluate. `row`: of evaluations."""
        if not self._callbacks:
            return
        self.evaluate = False
        self._call("on_evaluate", row["step"], row, metrics=dict(flat_numbers(row)))
        self._compare(row)  # after the call, as in Transformers' Trainer

    def _compare(self, row: Row) -> None:
        """Take the evaluation for the best one if its loss is the least so far."""
        loss, best = dict(flat_numbers(row)).get("eval_loss", math.inf), self._state.best_metric
        if best is None or loss < best:
            self._state.best_metric, self._state.best_global_step = loss, row["step"]

    def saved(self, step: int) -> None:
        self._call("on_save", step)

    def end(self, step: int) -> None:
        self._call("on_train_end", step)

    def _call(self, event: str, step: int, row: Row | None = None, **values: Any) -> None:
        """Call one method of all callbacks. `row`: of the step, if there is one."""
        if not self._callbacks:
            return
        self._state.global_step = step
        self._state.epoch = (row or {}).get("epoch", self._state.epoch)
        if values:
            self._state.log_history.append({**next(iter(values.values())), "step": step})
        for callback in self._callbacks:
            method = getattr(callback, event)
            control = method(self._args, self._state, self._control, **self._objects, **values)
            self._control = control or self._control
        self.save |= self._control.should_save
        self.evaluate |= self._control.should_evaluate
        self._control.should_save = self._control.should_evaluate = False


def _logs(row: Row) -> dict[str, float]:
    numbers = dict(flat_numbers(row))
    return {name: numbers[key] for name, key in LOGGED.items() if key in numbers}


def _step_of(made: tuple[Row, Mapping[str, float]]) -> int:
    return int(made[0]["step"])


def _check(callback: Any, base: Any) -> None:
    """Raise ConfigError unless `callback` is of the class `base`, and warn of its methods that are never called."""
    if not isinstance(callback, base):
        raise ConfigError(f"callbacks: expected transformers.TrainerCallback objects, got a {type(callback).__name__}")
    own = [
        name
        for name in dir(base)
        if name.startswith("on_") and getattr(type(callback), name) is not getattr(base, name)
    ]
    if unused := [name for name in own if name not in EVENTS]:
        say(f"warning: callbacks: {', '.join(unused)} of {type(callback).__name__} is never called here")
