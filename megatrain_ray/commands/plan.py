"""Implements `megatrain plan`: prints a plan, or the reason why there is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from megatrain_ray.config.groups import SpillConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.interrupts import Interrupts
from megatrain_ray.console.logs import print_lines, show
from megatrain_ray.console.start_summary import describe_pass, few_steps, memory_of_limits
from megatrain_ray.console.startup import spinner
from megatrain_ray.data.data_worker import count_data
from megatrain_ray.data.tokenize_data import cached_tokens, missing_data
from megatrain_ray.engine.device.cards import cards
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Machine, SpillSpace
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.export.evaluation_config import naming_reference, pass_config
from megatrain_ray.export.online_reference import check_reference
from megatrain_ray.export.teacher import find_teacher
from megatrain_ray.io.batching.data_counts import DataCounts
from megatrain_ray.io.tokens.token_files import WEIGHT_TYPE
from megatrain_ray.model.open_model import read_model
from megatrain_ray.planning.run_spec import planning_problem
from megatrain_ray.planning.sampling_outlook import sampling_lines
from megatrain_ray.planning.what_if import Alternative, alternatives, print_alternatives, run_lines, run_of
from megatrain_ray.rollouts.reward_process import check_rewards
from megatrain_ray.units import format_bytes


def show_plan(config: TrainConfig, *, as_json: bool, what_if: bool, price_per_hour: float | None) -> None:
    """Print the plan on standard output, and notes on data and disks that are missing here on standard error.

    If no plan fits, the alternatives with other memory (`what_if`) are printed all the same, and CapacityError is
    raised. Raises ConfigError if the configuration is invalid, or a reward function, reference or teacher will not do.
    """
    config, epochs = _with_known_steps(config), config.train.epochs
    if config.train.rollouts:
        check_rewards(config.train.rollouts)
    with Interrupts(), spinner("planning"):
        problem = planning_problem(config)
        check_reference(config)
        find_teacher(config, problem.source)
        try:
            plan, capacity_error = problem.plan(), None
        except CapacityError as error:
            plan, capacity_error = None, error
        found = list(alternatives(problem, plan)) if what_if else []
    if as_json and plan:
        print_lines(*_as_json(config, plan, found, price_per_hour).split("\n"))
    elif plan:
        print_lines(
            f"fits: {', '.join(memory_of_limits(plan))}",
            *describe(plan).split("\n"),
            *run_lines(config, plan, price_per_hour),
            *few_steps(epochs, config.train.steps),
            *reference_line(config),
            *sampling_lines(config, problem),
        )
    if found and not as_json:
        print_lines("")
        print_alternatives(found)
    if capacity_error:
        raise capacity_error
    for missing in missing_data(config.data):
        show(f"note: {missing}; a plan does without data, training does not", stream=sys.stderr)
    for note in (*_missing_disk(config.spill, problem.machine.spill), *_card_of_memory(config, problem.machine)):
        show(f"note: {note}", stream=sys.stderr)


def reference_line(config: TrainConfig) -> Iterator[str]:
    """Yield a line on the pass by a reference or teacher, before training: its memory, disk space and time.

    Raises CapacityError if it does not fit, and ConfigError.
    """
    if (name := config.train.reference_model) is None or config.train.rollouts:
        return
    with (
        naming_reference(config.train) if name != "model" else nullcontext(),
        pass_config(None if name == "model" else name, config, imagined=True) as settings,
    ):
        problem = planning_problem(settings)
    plan, counts, distills = problem.plan(), list(_known_counts(config)), config.train.objective == "distill"
    num_ids = min(config.train.distillation.top_k, problem.source.setting("vocab_size"))
    token_bytes = WEIGHT_TYPE.itemsize + (8 * num_ids + 4 if distills else 0)
    values = f"{token_bytes} B a token"
    if counts:
        values = format_bytes(token_bytes * sum(count.num_tokens for count in counts))
    time = describe_pass(plan, problem.scores_s, [count.num_rows for count in counts])
    role = "teacher" if distills else "reference"
    yield f"{role:<9} {', '.join(memory_of_limits(plan))}; {values} in the cache; {time}"


def _known_counts(config: TrainConfig) -> Iterator[DataCounts]:
    """Yield what the training and the held-out data have, if their tokens are cached."""
    with suppress(ConfigError, OSError, RuntimeError):  # training says what is wrong with the data
        config = config.resolve()
        vocab_size = read_model(config.model).setting("vocab_size")
        for data in (config.data, config.data.held_out if config.evaluates else None):
            if data and (tokens := cached_tokens(data, config.tokenizer, vocab_size)):
                yield count_data(data, tokens, vocab_size)


def _with_known_steps(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the steps of train.epochs, if the tokens of its data are cached."""
    if not config.counts_epochs:
        return config
    with suppress(ConfigError, OSError, RuntimeError):  # training says what is wrong with the data
        config = config.resolve()
        vocab_size = read_model(config.model).setting("vocab_size")
        if tokens := cached_tokens(config.data, config.tokenizer, vocab_size):
            return config.with_steps(count_data(config.data, tokens, vocab_size).num_rows)
    return config


def _as_json(config: TrainConfig, plan: Plan, found: Sequence[Alternative], price_per_hour: float | None) -> str:
    """Return the plan as in plan.json. With a price or alternatives, return an object with the plan and these."""
    text = plan.to_json().rstrip("\n")
    if price_per_hour is None and not found:
        return text
    run = run_of(config, plan, price_per_hour)
    beside = {"what_if": [alternative.numbers for alternative in found]} if found else {}
    return json.dumps({"plan": json.loads(text), "run": run and asdict(run), **beside}, indent=1)


def _card_of_memory(config: TrainConfig, machine: Machine) -> Iterator[str]:
    """Yield a line that says which card's rates were taken because nothing named one."""
    if machine.card is None or machine.profile is not None or config.hardware.profile in cards():
        return
    yield (
        f"rates are those of the {machine.card.machine.gpu}, by the size of GPU memory; hardware.profile=NAME plans "
        f"for another card: {', '.join(cards())}"
    )


def _missing_disk(spill: SpillConfig, space: SpillSpace | None) -> Iterator[str]:
    if spill.path is not None and space is not None and not Path(spill.path).is_dir():
        room = "any room" if spill.limit is None else "room for spill.limit"
        yield (
            f"spill.path: {spill.path} is not here; planned as if it were, with {room} and "
            f"{space.bytes_per_s / 1e9:.2g} GB/s, read and written at the same time"
        )
