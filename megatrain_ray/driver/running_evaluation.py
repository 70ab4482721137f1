"""The driver's side of an evaluation: batches of the held-out data, and the row of what came of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatrain_ray.io.batching.held_out import HeldOut
from megatrain_ray.workers.gpu_worker import HeldOutLoss

BATCHES_AHEAD = 2  # the next one is made while one is computed


class RunningEvaluation:
    """One pass over the held-out data with the weights after `step` updates."""

    def __init__(
        self, evaluate: Callable[[int, int], Any], batches: HeldOut, weights: Sequence[float], step: int
    ) -> None:
        """`evaluate`: begins a batch of a step, by number, and returns the call. `weights`: of the sources of
        `batches`."""
        self.step = step
        self._evaluate = evaluate
        self._weights = weights
        self._batches = batches
        self._start_s = time.monotonic()
        self._submitted = 0
        self._called: dict[Any, int] = {}
        self._losses: dict[int, HeldOutLoss] = {}
        self._given_up = False
        self._submit()

    @property
    def calls(self) -> list[Any]:
        """What is under way."""
        return list(self._called)

    @property
    def progress(self) -> tuple[int, int]:
        """Batches that are done, and all of them."""
        return len(self._losses), self._batches.num_batches

    def take(self, call: Any, loss: HeldOutLoss) -> None:
        """What came of one of `calls`."""
        self._losses[self._called.pop(call)] = loss
        self._submit()

    def give_up(self) -> None:
        """Nothing more is begun; what is under way is still to be waited for."""
        self._given_up = True

    @property
    def is_over(self) -> bool:
        return not self._called

    def row(self) -> dict[str, Any] | None:
        """Of evaluations.jsonl, once it is over; None where it was given up."""
        done, total = self.progress
        if done < total:
            return None
        sources: list[list[HeldOutLoss]] = [[] for _ in self._weights]
        for index, loss in sorted(self._losses.items()):
            sources[self._batches.source_of(index)].append(loss)
        return evaluation_row(self.step, sources, self._weights, time.monotonic() - self._start_s)

    def _submit(self) -> None:
        while not self._given_up and len(self._called) < BATCHES_AHEAD and self._submitted < self._batches.num_batches:
            self._called[self._evaluate(self.step, self._submitted)] = self._submitted
            self._submitted += 1


def evaluation_row(
    step: int, sources: Sequence[Sequence[HeldOutLoss]], weights: Sequence[float], seconds: float
) -> dict[str, Any]:
    """`sources`: losses of each one's batches. A source's loss is the mean over its supervised tokens; with several the
    mean of theirs by weight."""
    tokens = [sum(loss.num_supervised for loss in losses) for losses in sources]
    means = [sum(loss.total for loss in losses) / count for losses, count in zip(sources, tokens, strict=True)]
    loss = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights)
    of_sources = {"eval_losses": {str(index): mean for index, mean in enumerate(means)}} if len(means) > 1 else {}
    return {
        "step": step,
        "eval_loss": loss,
        "perplexity": perplexity(loss),
        "eval_tokens": sum(tokens),
        "eval_s": seconds,
        **of_sources,
    }


def perplexity(loss: float) -> float:
    """exp(loss); infinite beyond the numbers there are."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
