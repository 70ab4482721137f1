"""Exports the metrics of a run as Prometheus series.

Ray's agent on each node exports what its processes record, so whoever scrapes the cluster gets these series.
docs/monitoring.md lists them.

Setting a number takes 1.6 µs on a 2-core machine, and a step sets about twenty. Ray drops a gauge that is not set again
within two reports of 10 s. A step or an evaluation may take longer, so `keep` sets gauges again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.metrics.sink import Count, End, MetricSink
from megatrain_ray.run.run_processes import GPU, SHARD

EXPOSED = "exposed_s/"
KEEP_S = 5.0  # interval after which gauges are set again
STEP_BOUNDS_S = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]

# Column of a row of metrics: name and description of the gauge that shows its newest value.
GAUGES = {
    "loss": ("megatrain_loss", "Loss of the newest step, nats"),
    "eval_loss": ("megatrain_eval_loss", "Loss of the newest evaluation, nats"),
    "grad_norm": ("megatrain_grad_norm", "Norm of all gradients of the newest step, before clipping"),
    "lr": ("megatrain_learning_rate", "Learning rate of the newest step"),
    "tokens_per_s": ("megatrain_tokens_per_second", "Tokens of the newest step by its seconds; 0 once the run ended"),
    "model_tflops": ("megatrain_model_tflops", "Model TFLOPS of the newest step; 0 once the run ended"),
}
# Column of a row, and the tier that it counts bytes of.
HELD = {"hbm_peak_bytes": Tier.HBM, "host_bytes": Tier.HOST, "spill_bytes": Tier.NVME}
SPEEDS = ("tokens_per_s", "model_tflops")
BY_KIND = {  # counters with the tag `kind`, of a process
    Count.DEATHS: ("megatrain_deaths", "Processes of the run that died, by kind"),
    Count.REPLACEMENTS: ("megatrain_replacements", "Of these the ones that were replaced"),
    "read": ("megatrain_disk_read_bytes", "Bytes read of what spills, by kind of process"),
    "written": ("megatrain_disk_written_bytes", "Bytes written of what spills, by kind of process"),
}
DISK = "disk_bytes/"  # columns of it are named by who moved what, and by read or written


class RaySink(MetricSink):
    """Records metrics as Ray series with the tag `run`. Counters begin at 0 with each start of the run."""

    def __init__(self, run: str, steps: int, plan: Plan | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the series of the run named `run`, which is to make `steps` steps. `plan`: None if it is not known."""
        self._tags = {"run": run}
        self._clock = clock
        self._kept_s = clock()
        self._values: dict[tuple[Any, str | None], float] = {}  # values of gauges; the tier is None if a gauge has none
        self._gauges = {key: self._make(Gauge, *described) for key, described in GAUGES.items()}
        self._step = self._make(Gauge, "megatrain_step", "Updates made, those of earlier starts included")
        self._set(self._make(Gauge, "megatrain_planned_steps", "Updates to make: train.steps"), steps)
        self._steps = self._make(Counter, "megatrain_steps", "Updates made by this start")
        self._skipped = self._make(Counter, "megatrain_skipped_steps", "Of these, skipped: a gradient was not finite")
        self._seconds = self._make(Counter, "megatrain_training_seconds", "Seconds of steps")
        self._duration = self._make(
            Histogram, "megatrain_step_seconds", "Seconds a step; the sum is Ray's estimate", boundaries=STEP_BOUNDS_S
        )
        self._exposed = self._make(
            Counter, "megatrain_exposed_seconds", "Seconds that the compute stage waited, by cause", "cause"
        )
        self._held = self._make(Gauge, "megatrain_tier_bytes", "Bytes held, by tier", "tier")
        planned = self._make(Gauge, "megatrain_planned_tier_bytes", "Bytes that the plan counts on, by tier", "tier")
        for tier in Tier:
            self._set(planned, plan.total_bytes(tier) if plan else 0, tier.value)
        self._by_kind = {key: self._make(Counter, *described, "kind") for key, described in BY_KIND.items()}

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for key, gauge in self._gauges.items():
            if key in numbers:
                self._set(gauge, numbers[key])
        for key, tier in HELD.items():
            if key in numbers:
                self._set(self._held, numbers[key], tier.value)
        if "step_s" in numbers:  # the row is of an update, not of an evaluation
            self._update(step, numbers)

    def _update(self, step: int, numbers: Mapping[str, float]) -> None:
        self._set(self._step, step)
        self._steps.inc(1)
        self._seconds.inc(numbers["step_s"])
        self._duration.observe(numbers["step_s"])
        if numbers.get("skipped"):
            self._skipped.inc(1)
        for key, number in numbers.items():
            if number <= 0:  # Ray refuses to add 0
                continue
            if key.startswith(EXPOSED):
                self._exposed.inc(number, {"cause": key.removeprefix(EXPOSED)})
            elif key.startswith(DISK):
                moved, _, way = key.removeprefix(DISK).rpartition("_")
                self._by_kind[way].inc(number, {"kind": SHARD if moved == "shards" else GPU})

    def count(self, what: Count, kind: str) -> None:
        self._by_kind[what].inc(1, {"kind": kind})

    def keep(self) -> None:
        if self._clock() - self._kept_s >= KEEP_S:
            self._kept_s = self._clock()
            for (gauge, tier), value in self._values.items():
                self._set(gauge, value, tier)

    def close(self, end: End) -> None:
        """Set the speeds to 0: the process may continue without a run, and Ray shows the last values for a while."""
        for key in SPEEDS:
            self._set(self._gauges[key], 0)

    def _set(self, gauge: Any, value: float, tier: str | None = None) -> None:
        self._values[gauge, tier] = value
        gauge.set(value, {} if tier is None else {"tier": tier})

    def _make(self, kind: Any, name: str, text: str, *more_tags: str, **options: Any) -> Any:
        metric = kind(name, text, tag_keys=("run", *more_tags), **options)
        metric.set_default_tags(self._tags)
        return metric
