"""Predicts what a run that samples its answers does between updates, which its plan does not contain."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.step.reference_weights import largest_visit
from megatrain_ray.engine.step.sampler import MOST_ROWS
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.planning.run_spec import PlanningProblem
from megatrain_ray.units import format_bytes, format_duration, format_quantity, format_seconds

# Rows of a plan's memory that are free between two steps.
OF_STEPS = frozenset(("boundary activations", "kept activations", "attention masks", "work"))
LOGIT_BYTES = 8  # of a row's logits while its next token is drawn: in working precision, in FP32, and one that is made


def sampling_lines(config: TrainConfig, problem: PlanningProblem) -> Iterator[str]:
    """Yield lines on memory and time of the samplings and of a reference; none if the run samples no answers.

    Raises CapacityError if no plan fits.
    """
    rollouts, plan = config.train.rollouts, problem.plan()
    if rollouts is None:
        return
    every = f"every {format_quantity(rollouts.steps, 'step')}" if rollouts.steps > 1 else "every step"
    num_answers = rollouts.steps * plan.batch_size
    if rollouts.server is not None:
        yield f"sampling  {num_answers} answers {every} by {rollouts.server.url}, whose time is not counted"
    else:
        yield f"sampling  {_of_engine(config, problem, num_answers)} {every}"
    if config.train.reference_model is not None:
        num_bytes = largest_visit(problem.structure.layout()) * plan.precision.working_dtype.itemsize
        yield (
            f"reference {format_bytes(num_bytes)} of RAM and as much memory of the GPU, while it is read layer by "
            f"layer, {format_quantity(rollouts.steps, 'time')} {every}; predicted {format_seconds(problem.scores_s)} s "
            "of computing each time"
        )


def _of_engine(config: TrainConfig, problem: PlanningProblem, num_answers: int) -> str:
    rollouts, plan = config.train.rollouts, problem.plan()
    assert rollouts is not None
    of_gpu = -(-num_answers // plan.hosts.num_gpus)
    row_bytes = LOGIT_BYTES * problem.structure.vocab_size
    if (token_bytes := cache_bytes(problem.source, plan.precision.working_dtype.itemsize)) is not None:
        row_bytes += config.data.seq_len * token_bytes
    free = free_bytes(plan)
    rows = max(1, min(of_gpu, MOST_ROWS, of_gpu if free is None else free // row_bytes))
    token_s = problem.sampled_token_s
    seconds = -(-of_gpu // rows) * rollouts.max_new_tokens * token_s
    of = "" if free is None else f" of {format_bytes(free)} free"
    what = "cache and logits" if token_bytes is not None else "logits (this model's cache is not counted)"
    gpus = " on each GPU" if plan.hosts.num_gpus > 1 else ""
    return (
        f"{rows} answers at once{gpus}, {format_bytes(rows * row_bytes)}{of} for {what}; predicted {token_s:.2g} s a "
        f"token, up to {format_duration(seconds)} for {num_answers} answers of {rollouts.max_new_tokens} tokens"
    )


def free_bytes(plan: Plan) -> int | None:
    """Return the device memory that is free between two steps, within the limit; None: it is the host's memory."""
    if plan.limits.hbm_bytes is None:
        return None
    taken = sum(item.num_bytes for item in plan.memory_items if item.tier is Tier.HBM and item.name not in OF_STEPS)
    return max(0, plan.limits.hbm_bytes - taken)


def cache_bytes(source: ModelSource, itemsize: int) -> int | None:
    """Return the bytes of keys and values of a token in all layers; None for a model that has others in its cache.

    Where layers have a window or share keys, this is more than they take.
    """
    heads = source.setting("num_key_value_heads") or source.setting("num_attention_heads")
    width, all_heads = source.setting("hidden_size"), source.setting("num_attention_heads")
    layers = source.setting("num_hidden_layers")
    if not all(isinstance(value, int) for value in (heads, width, all_heads, layers)):
        return None
    if source.setting("kv_lora_rank") is not None or source.setting("linear_num_key_heads") is not None:
        return None
    return int(2 * layers * heads * (source.setting("head_dim") or width // all_heads) * itemsize)
