"""Computes the learning rate of a step: linear warm-up to the peak, then a schedule over the rest of the run."""

from __future__ import annotations

import math
from typing import Literal, assert_never

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, min_lr: float, steps: int, warmup_steps: int, schedule: Schedule) -> float:
    """Return the learning rate of `step` (1-based) in a run of `steps` updates.

    Warm-up: peak * step / warmup_steps, so that step 1 has a rate above zero and step `warmup_steps` has the peak.

    After it, with progress = (step - 1 - warmup_steps) / (steps - warmup_steps) in [0, 1): `cosine` is min_lr + (peak -
    min_lr) * (1 + cos(pi * progress)) / 2, and `linear` is peak - (peak - min_lr) * progress. They would reach min_lr
    in the step after the last, so that no update of a run is made at a rate of zero.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / (steps - warmup_steps)
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak - (peak - min_lr) * progress
        case "cosine":
            return min_lr + (peak - min_lr) * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(schedule)
