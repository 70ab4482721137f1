"""Says before the first step what is trained, on what, how, in which memory, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.optimizer.adamw import learning_rate
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.io.batching.data_counts import DataCounts
from megatrain_ray.io.checkpoints.leftovers import Leftovers
from megatrain_ray.units import format_bytes, format_count, format_duration, format_quantity

SHOWN = 4  # parts of a model that are named
FEW_STEPS = 10
SMALL_RATE = 0.1  # times the peak: next to nothing is learned


def describe_start(
    config: TrainConfig, plan: Plan, *, model_type: str, counts: DataCounts, num_held_out: int | None, num_made: int,
    leftovers: Leftovers, unreached: Sequence[str] = (), epochs: float | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield five lines: model, data, step, memory and time. Without steps (an evaluation): model and memory.

    If the model's folder holds something beyond the model, if no gradient reaches a part of it, or if train.epochs are
    few steps, a line more says so.

    model_type: the model's type in Transformers.
    counts: of one epoch of the data.
    num_held_out: records that are held out; None if there are none, or they were not counted.
    num_made: steps that earlier starts of the run have made.
    leftovers: what the folder holds beyond the model.
    unreached: parts of the model that no gradient reaches.
    epochs: train.epochs, if the configuration gives the steps by it.
    """
    steps, prediction = config.train.num_steps, plan.prediction
    yield from _describe_model(plan, model_type, leftovers, unreached, trains=bool(steps))
    if not steps:
        yield f"memory    {', '.join(memory_of_limits(plan))}"
        return
    yield _describe_data(config, plan, counts, num_held_out, epochs)
    yield from few_steps(epochs, steps)
    yield (
        f"step      {plan.batch_size} × {plan.step.seq_len} tokens, "
        f"{format_quantity(plan.step.num_micro_batches, 'micro-batch')} of {plan.step.micro_batch_size}{_gpus(plan)}; "
        f"learning rate {_rate(config.train, num_made)}"
    )
    yield f"memory    {', '.join(memory_of_limits(plan))}"
    if prediction and (to_come := steps - num_made) > 0:
        speed = format_count(plan.batch_size * plan.step.seq_len / prediction.step_s)
        yield (
            f"time      predicted {prediction.step_s:.3g} s a step, {speed} tokens/s, "
            f"{format_duration(prediction.step_s * to_come)} for {format_quantity(to_come, 'step')}"
        )


def _describe_model(
    plan: Plan, model_type: str, leftovers: Leftovers, unreached: Sequence[str], *, trains: bool
) -> Iterator[str]:
    """Yield a line on the model, and lines on what training leaves as it is. trains: there are steps."""
    trains_part = trains and plan.num_trained != plan.num_parameters
    trained = f", {format_count(plan.num_trained)} of them trained" if trains_part else ""
    yield (
        f"model     {model_type}, {format_count(plan.num_parameters)} parameters{trained}, {plan.number_formats}, "
        f"on {plan.device}"
    )
    if leftovers.tensors and trains:
        yield f"kept      in exports as they were, since the model has no such part: {leftovers}"
    if unreached and trains:
        more = f" and {len(unreached) - SHOWN} more" if len(unreached) > SHOWN else ""
        yield f"untouched since no gradient reaches them: {', '.join(unreached[:SHOWN])}{more}"


def _describe_data(
    config: TrainConfig, plan: Plan, counts: DataCounts, num_held_out: int | None, epochs: float | None
) -> str:
    """Return a line on the training data, the passes over them, and the held-out data."""
    made = config.train.num_steps * plan.batch_size / counts.num_rows
    filled = f" (train.epochs: {epochs:g}, up to a whole step)" if epochs and made > epochs else ""
    held_out = f"; {format_quantity(num_held_out, 'record')} held out" if num_held_out else ""
    if config.data.held_out is None and not num_held_out:
        shares = config.data.kind != "rollouts" and config.data.stream is None
        key = "data.eval_fraction" if shares else "data.eval_path"
        held_out = f"; none held out ({key})"
    return (
        f"data      {', '.join(_amounts(counts, plan.step.seq_len))} of {plan.step.seq_len} tokens; "
        f"{format_quantity(config.train.num_steps, 'step')} of {format_quantity(plan.batch_size, 'row')} are "
        f"{made:.3g} epochs{filled}{held_out}"
    )


def few_steps(epochs: float | None, steps: int | None) -> Iterator[str]:
    """Yield a warning if the epochs that a configuration gives are few steps. None: it gives none, or not known."""
    if epochs and steps and steps < FEW_STEPS:
        yield f"few       {format_quantity(steps, 'step')} may teach little: a smaller train.batch_size makes more"


def describe_pass(plan: Plan, scores_s: float, num_rows: Sequence[int]) -> str:
    """Return how long a pass for log-probabilities will take.

    scores_s: predicted seconds of a batch.
    num_rows: of each source; empty: not known.
    """
    speed = f"predicted {format_count(plan.batch_size * plan.step.seq_len / scores_s)} tokens/s"
    if not num_rows:
        return speed
    num_batches = sum(-(-count // plan.batch_size) for count in num_rows)
    return f"{speed}, {format_duration(num_batches * scores_s)} for {format_quantity(sum(num_rows), 'row')}"


def _rate(train: OptimizationConfig, num_made: int) -> str:
    """Return the peak of the learning rate and its schedule; on a resume the next step's rate, and where it goes."""
    peak, falls = f"{train.lr:g}", train.schedule != "constant"
    if num_made <= train.num_warmup_steps:
        warmed_up = f" after {format_quantity(train.num_warmup_steps, 'step')} of warm-up" if train.warmup_steps else ""
        return f"{peak}{f', {train.schedule} to {train.min_lr:g}' if falls else ''}{warmed_up}"
    step = num_made + 1
    rate = learning_rate(
        step, peak=train.lr, min_lr=train.min_lr, steps=train.num_steps, warmup_steps=train.num_warmup_steps,
        schedule=train.schedule,
    )  # fmt: skip
    falling = f", falling to {train.min_lr:g} (peak {peak})" if falls else ""
    hint = f"; train.schedule=constant makes it {peak}" if rate < SMALL_RATE * train.lr else ""
    return f"{rate:.3g} at step {step}{falling}{hint}"


def _amounts(counts: DataCounts, seq_len: int) -> Iterator[str]:
    """Yield the numbers of records, tokens and rows, and the rows' length at which no record would be too long."""
    if counts.num_records is not None:
        dropped = counts.num_dropped - counts.num_bad
        fates = ((counts.num_cut, "cut"), (counts.num_bad, "bad and skipped"), (dropped, "dropped"))
        named = ", ".join(f"{number} {fate}" for number, fate in fates if number)
        if counts.longest - 1 > seq_len:
            named += f"; data.seq_len={counts.longest - 1} would hold the longest"
        yield f"{format_quantity(counts.num_records, 'record')}{f' ({named})' if named else ''}"
    yield f"{format_count(counts.num_tokens)} tokens"
    yield format_quantity(counts.num_rows, "row")


def _gpus(plan: Plan) -> str:
    return f" on each of {plan.hosts.num_gpus} GPUs" if plan.hosts.num_gpus > 1 else ""


def memory_of_limits(plan: Plan) -> Iterator[str]:
    """Yield what the plan takes of each memory, and the limit it keeps."""
    limits = plan.limits
    for name, tier, limit in (
        ("GPU", Tier.HBM, limits.hbm_bytes),
        ("RAM", Tier.HOST, limits.ram_bytes),
        ("disk", Tier.NVME, limits.spill_bytes),
    ):
        if limit is not None:
            on_cpu = plan.total_bytes(Tier.HBM) if tier is Tier.HOST and plan.device == "cpu" else 0
            yield f"{name} {format_bytes(plan.total_bytes(tier) + on_cpu)} of {format_bytes(limit)}"
