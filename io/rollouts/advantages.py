"""Makes advantages of the rewards of the answers to each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.rollouts.read_rollout import Rollout

ScaleRewards = Literal["group", "batch", "none"]
EPSILON = 1e-4  # added to standard deviations, as in TRL


class Grouping:
    """Numbers the groups of rollouts that come one after the other."""

    def __init__(self) -> None:
        self._named: dict[str, int] = {}
        self._previous: str | None = None  # prompt of the rollout before, if that names no group
        self._newest = -1

    def number(self, rollout: Rollout) -> int:
        """Return the group of a rollout: of its name, or that of the one before if that has the same prompt."""
        if rollout.names_group:
            self._previous = None
            if rollout.group not in self._named:
                self._newest += 1
                self._named[rollout.group] = self._newest
            return self._named[rollout.group]
        if rollout.group != self._previous:
            self._newest += 1
        self._previous = rollout.group
        return self._newest


def advantages(rewards: Sequence[float], groups: Sequence[int], scale: ScaleRewards) -> NDArray[np.float32]:
    """Return the advantage of each answer: its reward minus the mean of its group, ÷ (standard deviation + 1e-4).

    rewards: NaN for an answer without one, whose advantage is 0.
    groups: number of the group of each, from 0.
    scale: whose standard deviation it is (n - 1 in its denominator, 0 of a single answer): that of the group, or of
        all; "none": it is not divided.
    """
    values, of = np.array(rewards, np.float64), np.array(groups, np.int64)
    known = ~np.isnan(values)
    size = int(of.max(initial=-1)) + 1
    counts = np.bincount(of[known], minlength=size)
    least = np.full(size, np.inf)
    np.minimum.at(least, of[known], values[known])
    above = np.where(known, values - least[of], 0.0)  # the mean of equal rewards would be another number by rounding
    means = np.bincount(of, above, size) / np.maximum(counts, 1)
    centred = np.where(known, above - means[of], 0.0)
    if scale == "group":
        squares = np.bincount(of, centred**2, size)
        divisors = np.sqrt(squares / np.maximum(counts - 1, 1))[of] + EPSILON
    elif scale == "batch":
        divisors = np.array(deviation(values[known]) + EPSILON)
    else:
        divisors = np.array(1.0)
    return (centred / divisors).astype(np.float32)


def deviation(rewards: NDArray[np.floating]) -> float:
    """Return the standard deviation of rewards; 0 of a single one, of none NaN."""
    if rewards.size < 2:
        return 0.0 if rewards.size else math.nan
    return float(rewards.std(ddof=1))
