"""Calls the callbacks of Transformers' Trainer that a program has given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_ray.console.logs import say
from megatrain_ray.errors import ConfigError
from megatrain_ray.metrics.sink import flat_numbers

# What on_log is given, by the names that Transformers has for it, and the keys of a row of metrics.
LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "epoch": "epoch",
    "tokens_per_s": "tokens_per_s",
}
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

    def begin(self, step: int, steps: int) -> None:
        """Call on_train_begin, before the first step after `step` of `steps`."""
        if self._callbacks:
            self._control.should_training_stop = False
            self._state.max_steps = steps
            self._call("on_train_begin", step)

    def step_ended(self, row: Mapping[str, Any]) -> None:
        """Call on_step_end and on_log. `row`: of metrics."""
        numbers = dict(flat_numbers(row))
        logs = {name: numbers[key] for name, key in LOGGED.items() if key in numbers}
        self._call("on_step_end", row["step"], row)
        self._call("on_log", row["step"], row, logs=logs)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Call on_evaluate. `row`: of evaluations."""
        if not self._callbacks:
            return
        metrics, state = dict(flat_numbers(row)), self._state
        self.evaluate = False
        self._call("on_evaluate", row["step"], row, metrics=metrics)
        loss = metrics.get("eval_loss", math.inf)
        if state.best_metric is None or loss < state.best_metric:  # after the call, as in Transformers' Trainer
            state.best_metric, state.best_global_step = loss, row["step"]

    def saved(self, step: int) -> None:
        self._call("on_save", step)

    def end(self, step: int) -> None:
        self._call("on_train_end", step)

    def _call(self, event: str, step: int, row: Mapping[str, Any] | None = None, **values: Any) -> None:
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
