"""Measures the resident ceiling: the speed of the model's layers, head and loss with all weights on the device.

There is no optimizer and nothing is moved. A training can come near this speed and never exceed it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatrain_ray.engine.measure.resident_model import ResidentModel
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.model.flop_count import FlopCount
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.workers.open_device import make_device

WARMUP_STEPS = 2
MEASURED_STEPS = 5
GAIN = 1.01  # speed-up by doubling the micro-batch below which no larger one is tried


@dataclass(frozen=True)
class SizeTrial:
    """Holds the speed of the median step with one size of micro-batch; None if memory ran out."""

    micro_batch_size: int
    model_tflops: float | None


@dataclass(frozen=True)
class Ceiling:
    """Holds the result of the measurement.

    best: the fastest trial; None if not even one sequence fits on the device.
    trials: all trials in the order in which they were made.
    hbm_peak_bytes: peak device memory of all trials.
    """

    best: SizeTrial | None
    trials: tuple[SizeTrial, ...]
    hbm_peak_bytes: int


def measure_ceiling(run_spec: RunSpec) -> Ceiling:
    """Measure the ceiling with the best size of micro-batch.

    On the CPU the size is at most the batch of a step: nothing else bounds it there.
    """
    plan = run_spec.plan
    # The ceiling may use the whole device, whatever the plan's limit.
    whole = replace(plan, limits=replace(plan.limits, hbm_bytes=None))
    device = make_device(whole, deterministic=run_spec.config.train.deterministic)
    limit = plan.step.micro_batch_size * plan.step.num_micro_batches if plan.device == "cpu" else None
    try:
        with device.activate():
            model = ResidentModel(run_spec.source.factory, run_spec.structure, plan, device)
            flops = FlopCount.of(run_spec.structure, run_spec.source)
            trials = search(partial(_tflops, run_spec, model, flops), plan.step.micro_batch_size, limit)
        peak_bytes = device.memory().peak_bytes
    except torch.OutOfMemoryError:  # the weights alone do not fit
        return Ceiling(None, (), device.memory().peak_bytes)
    finally:
        device.close()
    fitting = [trial for trial in trials if trial.model_tflops is not None]
    return Ceiling(max(fitting, key=lambda trial: trial.model_tflops or 0.0, default=None), trials, peak_bytes)


def search(rate: Callable[[int], float], first: int, limit: int | None) -> tuple[SizeTrial, ...]:
    """Try sizes of micro-batch, from `first` sequences on, and return the trials.

    If `first` does not fit, the size is halved until it fits. Otherwise it is doubled, up to `limit`, until it does not
    fit or doubling gains less than `GAIN`. The search does not begin at 1, since every size has to be compiled.

    rate: returns model TFLOPS of a size; raises torch.OutOfMemoryError if it does not fit.
    """
    trials = [_attempt(rate, first)]
    while trials[-1].model_tflops is None and trials[-1].micro_batch_size > 1:
        trials.append(_attempt(rate, trials[-1].micro_batch_size // 2))
    if len(trials) > 1:
        return tuple(trials)
    while (before := trials[-1].model_tflops) is not None:
        size = 2 * trials[-1].micro_batch_size
        if limit is not None and size > limit:
            break
        trials.append(_attempt(rate, size))
        if (trials[-1].model_tflops or 0.0) < GAIN * before:
            break
    return tuple(trials)


def _attempt(rate: Callable[[int], float], size: int) -> SizeTrial:
    try:
        return SizeTrial(size, rate(size))
    except torch.OutOfMemoryError:
        pass  # collect below, outside the handler: the exception's traceback refers to the step's tensors
    gc.collect()
    return SizeTrial(size, None)


def _tflops(run_spec: RunSpec, model: ResidentModel, flops: FlopCount, micro_batch_size: int) -> float:
    """Return model TFLOPS of the median step of one micro-batch of whole rows, where each row is one document."""
    seq_len = run_spec.plan.step.seq_len
    num_tokens = micro_batch_size * seq_len
    step = _random_step(run_spec, micro_batch_size)
    runner = model.with_micro_batch(micro_batch_size, step.objective)
    seconds = []
    for _ in range(WARMUP_STEPS + MEASURED_STEPS):
        start_s = time.perf_counter()
        runner.read(runner.submit(step))
        model.device.timeline.clear()
        seconds.append(time.perf_counter() - start_s)
    step_s = statistics.median(seconds[WARMUP_STEPS:])
    return flops.per_step(num_tokens, num_tokens * seq_len) / step_s / 1e12


def _random_step(run_spec: RunSpec, micro_batch_size: int) -> StepInput:
    """Return a step of one micro-batch of random token ids."""
    seq_len, train = run_spec.plan.step.seq_len, run_spec.config.train
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(run_spec.structure.vocab_size, (micro_batch_size, seq_len + 1), generator=generator)
    micro_batch = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    num_supervised = micro_batch_size * seq_len
    return StepInput(1, (micro_batch,), num_supervised, train.seed, Objective(train.z_loss, train.label_smoothing))
