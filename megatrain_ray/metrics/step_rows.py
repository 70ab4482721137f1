"""Makes a row of metrics.jsonl for each step, and measures the time of steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from megatrain_ray.engine.optimizer.adamw import learning_rate
from megatrain_ray.engine.step.step_data import StepReport
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.rollouts.advantages import deviation
from megatrain_ray.io.storage.measured_store import BusyInterval
from megatrain_ray.model.flop_count import FlopCount
from megatrain_ray.planning.run_spec import RunSpec

EXPOSED_CAUSES = ("h2d", "d2h", "optimizer", "host_accumulation", "loss", "data", "python")


class StepRows:
    """Makes the rows of one run. A step lasts from `start_clock`, or from the previous row, to its own row."""

    started_s: float  # when the step of the next row began
    newest: BusyInterval  # when the step of the newest row began and ended

    def __init__(self, run_spec: RunSpec, host_bytes: int) -> None:
        """Create the rows of a run, and start the clock. `host_bytes`: bytes of all arenas."""
        self._train = run_spec.config.train
        self._is_aliased = run_spec.is_aliased
        self._flops = FlopCount.of(run_spec.structure, run_spec.source)
        self._host_bytes = host_bytes
        self.start_clock()

    def start_clock(self) -> None:
        """Start the time of the next step now. What happened before counts in no step."""
        self.started_s = time.perf_counter()

    def learning_rate(self, step: int) -> float:
        train = self._train
        if self._is_aliased:  # many layers' updates hit the same weights, which must not grow
            return 0.0
        return learning_rate(
            step, peak=train.lr, min_lr=train.min_lr, steps=train.num_steps, warmup_steps=train.num_warmup_steps,
            schedule=train.schedule, from_zero=train.warmup_from_zero,
        )  # fmt: skip

    def row(self, report: StepReport, batch: Batch, data_s: float) -> dict[str, Any]:
        """Return the row of the step that ends now. `data_s`: seconds that the step waited for its batch."""
        now_s = time.perf_counter()
        self.newest = BusyInterval(self.started_s, now_s)
        step_s, self.started_s = now_s - self.started_s, now_s
        flops = self._flops.per_step(batch.num_tokens, batch.sum_squared_lengths, batch.num_image_tokens)
        named = {"bad_parameter": report.bad_parameter} if report.skipped else {}
        retries = {"hbm_retries": report.memory.num_retries} if report.memory.num_retries else {}
        return {
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": self.learning_rate(report.step),
            "tokens": batch.num_supervised,
            "skipped": report.skipped,
            "step_s": step_s,
            "tokens_per_s": batch.num_tokens / step_s,
            "model_tflops": flops / step_s / 1e12,
            "exposed_s": _exposed_s(report, step_s, data_s),
            "hbm_peak_bytes": report.memory.peak_bytes,
            "hbm_held_bytes": report.memory.held_bytes,
            "host_bytes": self._host_bytes,
            **report.metrics,
            **_of_rollouts(batch),
            **named,
            **retries,
            **({"aliased": True} if self._is_aliased else {}),
        }


def _of_rollouts(batch: Batch) -> dict[str, float]:
    """Return the means of rewards and lengths, and the standard deviation of rewards; nothing for other data."""
    means = {name: total / count for name, (total, count) in batch.means.items() if count}
    if batch.rewards is not None and "reward" in means:
        means["reward_std"] = deviation(batch.rewards[~np.isnan(batch.rewards)])
    return means


def _exposed_s(report: StepReport, step_s: float, data_s: float) -> dict[str, float]:
    """Return exposed seconds by cause. Python's are those neither in the engine's step nor a wait for data."""
    python_s = max(0.0, step_s - data_s - report.step_s)
    return dict.fromkeys(EXPOSED_CAUSES, 0.0) | report.exposed_s | {"data": data_s, "python": python_s}
