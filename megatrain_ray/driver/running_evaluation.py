"""Runs an evaluation from the driver: it submits batches of the held-out data, and makes a row of their losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatrain_ray.engine.objectives.logprob_objective import joining, with_margin
from megatrain_ray.io.batching.batch_stream import HeldOut
from megatrain_ray.workers.messages import HeldOutLoss

Keep = Callable[[HeldOut, int, HeldOutLoss], None]  # takes all batches, the number of one, and its result

BATCHES_AHEAD = 2  # batches under way at once: the next one is made while one is computed


class RunningEvaluation:
    """Runs one pass over the held-out data with the weights after `step` updates."""

    def __init__(
        self, evaluate: Callable[[int, int], Any], batches: HeldOut, weights: Sequence[float], step: int,
        keep: Keep = lambda batches, index, loss: None,
    ) -> None:  # fmt: skip
        """Submit the first batches.

        evaluate: submits a batch, by step and number of the batch, and returns the call.
        weights: of the sources of `batches`.
        keep: is called with the result of each batch, the only place for its log-probabilities.
        """
        self.step = step
        self._evaluate = evaluate
        self._weights = weights
        self._batches = batches
        self._keep = keep
        self._start_s = time.monotonic()
        self._submitted = 0
        self._called: dict[Any, int] = {}
        self._losses: dict[int, HeldOutLoss] = {}
        self._given_up = False
        self._submit()

    @property
    def calls(self) -> list[Any]:
        return list(self._called)

    @property
    def progress(self) -> tuple[int, int]:
        """Return how many batches are done, and how many there are."""
        return len(self._losses), self._batches.num_batches

    @property
    def tokens_per_s(self) -> float:
        """Return the inputs per second so far."""
        return sum(loss.num_tokens for loss in self._losses.values()) / (time.monotonic() - self._start_s)

    def add_result(self, call: Any, loss: HeldOutLoss) -> None:
        """Add the result of one of `calls`, and submit the next batch."""
        index = self._called.pop(call)
        self._keep(self._batches, index, loss)
        self._losses[index] = replace(loss, logprobs=None)
        self._submit()

    def give_up(self) -> None:
        """Submit no more batches. Those under way must still be waited for."""
        self._given_up = True

    @property
    def is_over(self) -> bool:
        return not self._called

    def row(self) -> dict[str, Any] | None:
        """Return the row of evaluations.jsonl once the evaluation is over, or None if it was given up."""
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
    """Return a row of evaluations.jsonl from the losses of each source's batches.

    The loss of a source is the mean over its supervised tokens by their loss weights, or over its documents. Of several
    sources it is the weighted mean of theirs.
    """

    def mean_of(means: Sequence[float]) -> float:
        return sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights)

    totals = [sum(loss.total_weight for loss in losses) for losses in sources]
    means = [sum(loss.total for loss in losses) / total for losses, total in zip(sources, totals, strict=True)]
    loss = mean_of(means)
    joined = {
        name: mean_of([_joined(name, [loss.metrics[name] for loss in losses]) for losses in sources])
        for name in sources[0][0].metrics
        if all(any(loss.metrics[name][1] for loss in losses) for losses in sources)
    }
    metrics = {f"eval_{name}": value for name, value in with_margin(joined).items()}
    if "eval_cross_entropy" in metrics or not metrics:
        metrics["perplexity"] = perplexity(metrics.get("eval_cross_entropy", loss))
    num_tokens = sum(loss.num_supervised for losses in sources for loss in losses)
    row: dict[str, Any] = {
        "step": step, "eval_loss": loss, **metrics, "eval_tokens": num_tokens,
        "eval_s": seconds,
    }  # fmt: skip
    if len(means) > 1:
        row["eval_losses"] = {str(index): mean for index, mean in enumerate(means)}
    return row


def _joined(name: str, parts: Sequence[tuple[float, float]]) -> float:
    """Return a metric of all batches of a source. parts: of each a sum, and what it is divided by."""
    totals, counts = zip(*parts, strict=True)
    return joining(name)(totals) / joining(name)(counts)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that is beyond floating-point numbers."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
