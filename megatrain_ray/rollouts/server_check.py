"""Warns if a server that samples computes other log-probabilities than the run does with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.console.logs import say

# Largest ratio of a token's probabilities that rounding explains, by train.precision. In FP32 vLLM's were within 1e-6
# (benchmarks/README.md#rollouts-by-vllm), and another kernel may sum in FP32 otherwise. The others are a guess.
OF_ROUNDING = {"fp32": 1.1, "tf32": 4.0, "bf16": 4.0}


class ServerCheck:
    """Looks at the first update after each sampling: the model has the weights then that the server got."""

    def __init__(self, train: OptimizationConfig) -> None:
        self._server = train.rollouts.server if train.rollouts else None
        self._precision = train.precision
        self._has_warned = False

    def ended(self, row: Mapping[str, Any], sampled: int) -> None:
        """Warn, once, if the row of an update has a ratio far beyond rounding. sampled: updates before the sampling."""
        most = OF_ROUNDING[self._precision]
        if self._server is None or self._has_warned or row["step"] != sampled + 1 or not row["ratio_max"] > most:
            return
        self._has_warned = True
        say(
            f"warning: ratio_max of update {row['step']} is {row['ratio_max']:.3g}, which should be 1: the sampling "
            f"before had the same weights, and rounding makes {most:g} at most. {self._server.url} did not load all "
            f"of them, or computes in another precision than train.precision: {self._precision}; see "
            "docs/post_training.md#a-server"
        )
