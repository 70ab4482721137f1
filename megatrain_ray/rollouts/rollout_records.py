"""Makes the records of rollouts of completions and their rewards, and the numbers that metrics have of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatrain_ray.engine.step.sampler import Completion
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.rollouts.advantages import deviation
from megatrain_ray.read_file import parse_json

Record = dict[str, Any]


def total_rewards(scores: Mapping[str, Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of each completion's rewards, without those of functions that do not judge it.

    None: no function judges it. Raises MegatrainError if that is so of all completions.
    """
    totals: list[float | None] = []
    for row in zip(*scores.values(), strict=True):
        judged = [weight * score for weight, score in zip(weights, row, strict=True) if score is not None]
        totals.append(math.fsum(judged) if judged else None)
    if totals.count(None) == len(totals):
        raise MegatrainError(
            f"nothing to learn from: all reward functions ({', '.join(scores)}) returned None for each of "
            f"{len(totals)} answers; return numbers, or add a function that judges them"
        )
    return totals


def rollout_record(
    prompt_ids: Sequence[int], group: int, completion: Completion, text: str, scores: Mapping[str, float | None],
    reward: float | None,
) -> Record:  # fmt: skip
    """Return a record as data.kind: rollouts reads it, with the text and each function's reward for people."""
    return {
        "group": group, "prompt_ids": list(prompt_ids), "completion_ids": completion.ids,
        "logprobs": completion.logprobs, "ended": completion.ended, "reward": reward, "rewards": dict(scores),
        "text": text, **({"advantage": 0.0} if reward is None else {}),
    }  # fmt: skip


def read_rollouts(file: Path) -> list[Record]:
    """Return the records of a file that the run has written. Raises OSError, ValueError."""
    return [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]


def summary_of(records: Sequence[Record]) -> dict[str, float]:
    """Return the means over a sampling: rewards, the length of completions, and the share that ended."""
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    scores = {
        name: [record["rewards"][name] for record in records if record["rewards"][name] is not None]
        for name in records[0]["rewards"]
    }
    return {
        "reward": fmean(rewards),
        "reward_std": deviation(np.array(rewards)),
        **{f"reward/{name}": fmean(values) for name, values in scores.items() if values},
        "completion_tokens": fmean(len(record["completion_ids"]) for record in records),
        "ended": fmean(record["ended"] for record in records),
    }
