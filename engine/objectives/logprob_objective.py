"""Defines what an objective over log-probabilities is: it turns those of a micro-batch into a loss and loss weights.

Such a loss depends on the logits through the targets' log-probabilities only. So its derivatives by these are the loss
weights with which the tokens' cross-entropies have the same gradient.

D: documents; N: tokens of a micro-batch, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch

from megatrain_ray.io.batching.batch import BatchCounts


class Documents(NamedTuple):
    """Says where the documents of a micro-batch lie in its tokens.

    lengths: number of inputs of each document, and of the pads of a row.
    are_real: for each of these, whether it is a document.
    """

    lengths: tuple[int, ...]
    are_real: tuple[bool, ...]

    @staticmethod
    def of(positions: torch.Tensor | None, real: torch.Tensor) -> Documents:
        """Find the documents of rows. positions, real: [B, T] as in `Batch`, on the host."""
        if positions is None:  # one document a row, and its pads
            positions = torch.arange(real.shape[1]).expand_as(real)
            positions = torch.where(real, positions, positions - real.sum(1, keepdim=True))
        begins = torch.nonzero(positions.flatten() == 0).flatten()
        ends = torch.cat([begins[1:], begins.new_tensor([positions.numel()])])
        return Documents(tuple((ends - begins).tolist()), tuple(real.flatten()[begins].tolist()))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over each document, [D]. values: FP32 [N]. Each sum is in the order of tokens."""
        parts = zip(torch.split(values, list(self.lengths)), self.are_real, strict=True)
        sums = [part.sum() for part, is_real in parts if is_real]
        return torch.stack(sums) if sums else values.new_zeros(0)

    def firsts(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each document's first token, [D]. values: [N]."""
        return values[self._bounds[0].to(values.device)]

    def lasts(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each document's last token, [D]. values: [N]."""
        return values[self._bounds[1].to(values.device)]

    @property
    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of each document's first token, and of its last one."""
        lengths, are_real = torch.tensor(self.lengths), torch.tensor(self.are_real, dtype=torch.bool)
        ends = lengths.cumsum(0)
        return (ends - lengths)[are_real], ends[are_real] - 1

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return each document's value at all of its tokens, [N], and 0 at pads. values: [D]."""
        each = iter(values)
        zero = values.new_zeros(())
        parts = zip(self.lengths, self.are_real, strict=True)
        return torch.cat([(next(each) if is_real else zero).expand(length) for length, is_real in parts])


class LogprobTargets(Protocol):
    """Describes what the tokens of a micro-batch are to predict, as `Targets` of chunked_loss.py."""

    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def documents(self) -> Documents | None: ...
    @property
    def reference(self) -> torch.Tensor | None: ...
    @property
    def columns(self) -> Mapping[str, torch.Tensor]: ...


class Mean(NamedTuple):
    """Holds a micro-batch's part of a mean: what it adds to the sum, and what the sum of the step is divided by."""

    total: torch.Tensor
    divisor: float

    @property
    def share(self) -> torch.Tensor:
        """Return what the micro-batch adds to the step's mean."""
        return self.total / self.divisor


class LogprobLoss(NamedTuple):
    """Holds the loss of a micro-batch.

    metrics: by name. Those whose name ends in _max are joined by their maximum, with a divisor of 1.
    weights: loss weight of each token, [N], 0 where it is not supervised. It is - d loss.share / d logprob.
    """

    loss: Mean
    metrics: dict[str, Mean]
    weights: torch.Tensor


class LogprobObjective(Protocol):
    """Defines what is minimised for the documents of a step."""

    def loss(self, logprobs: torch.Tensor, targets: LogprobTargets, counts: BatchCounts) -> LogprobLoss:
        """Return the loss of a micro-batch and the loss weights of its tokens.

        logprobs: of the targets, FP32 [N], 0 where they are not supervised.
        counts: of the whole step.
        """
        ...


def with_margin(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the margin of the mean rewards of good and of bad answers where these are of no pairs."""
    rewards = [metrics[name] for name in ("reward_chosen", "reward_rejected") if name in metrics]
    return {"reward_margin": rewards[0] - rewards[1], **metrics} if len(rewards) == 2 else dict(metrics)


def joining(name: str) -> Callable[[Iterable[float]], float]:
    """Return what makes one metric of its parts: `sum`, or `max` if the name says so."""
    return max if name.endswith("_max") else sum
