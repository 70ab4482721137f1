"""Computes objectives over pairs of answers, from the log-probabilities of their tokens.

The loss of a pair depends on the sums of log-probabilities of its two documents only. So its derivatives by these sums
are the loss weights with which the tokens' cross-entropies have the same gradient.

P: pairs; N: tokens of a micro-batch, row after row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from megatrain_ray.io.tokens.token_files import IGNORED

PairKind = Literal["dpo", "ipo", "hinge", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
LARGEST_MEAN = -1e-7  # of log-probabilities of which ORPO takes the odds: those of a certain answer are infinite


class Documents(NamedTuple):
    """Says where the documents of a micro-batch lie in its tokens. Each two documents are a pair, the chosen one first.

    lengths: number of inputs of each document, and of the pads of a row.
    are_real: for each of these, whether it is a document.
    """

    lengths: tuple[int, ...]
    are_real: tuple[bool, ...]

    @staticmethod
    def of(positions: torch.Tensor, real: torch.Tensor) -> Documents:
        """Find the documents of rows. positions, real: [B, T] as in `Batch`, on the host."""
        begins = torch.nonzero(positions.flatten() == 0).flatten()
        ends = torch.cat([begins[1:], begins.new_tensor([positions.numel()])])
        return Documents(tuple((ends - begins).tolist()), tuple(real.flatten()[begins].tolist()))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over each document, [P, 2]. values: FP32 [N]. Each sum is in the order of tokens."""
        parts = zip(torch.split(values, list(self.lengths)), self.are_real, strict=True)
        return torch.stack([part.sum() for part, is_real in parts if is_real]).view(-1, 2)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return each document's value at all of its tokens, [N], and 0 at pads. values: [P, 2]."""
        each = iter(values.flatten())
        zero = values.new_zeros(())
        parts = zip(self.lengths, self.are_real, strict=True)
        return torch.cat([(next(each) if is_real else zero).expand(length) for length, is_real in parts])


class PairTargets(Protocol):
    """Describes what the tokens of a micro-batch are to predict, as `Targets` of chunked_loss.py."""

    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def documents(self) -> Documents | None: ...
    @property
    def reference(self) -> torch.Tensor | None: ...


class OfPairs(NamedTuple):
    """Holds the losses and rewards of pairs."""

    losses: torch.Tensor  # [P]
    rewards: torch.Tensor  # [P, 2]


class PairLoss(NamedTuple):
    """Holds the loss of a micro-batch's pairs.

    loss, metrics: shares of the step's.
    weights: loss weight of each token, [N], 0 where it is not supervised.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    weights: torch.Tensor


@dataclass(frozen=True)
class PairObjective:
    """Defines what is minimised for each pair of a chosen and a rejected answer.

    The names of the numbers are those of `train.preference`.
    """

    kind: PairKind
    beta: float = 0.1
    gamma: float = 0.5
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Return whether rewards are relative to a reference model."""
        return self.kind not in WITHOUT_REFERENCE

    def of_pairs(self, sums: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor | None = None) -> OfPairs:
        """Return the losses and rewards. Differentiable by `sums`.

        sums: of the log-probabilities of each document's supervised tokens, FP32 [P, 2]: chosen, rejected.
        counts: number of these tokens, FP32 [P, 2].
        reference: sums by the reference model, FP32 [P, 2], if the objective needs them.
        """
        means = sums / counts
        scores = means if reference is None else sums - reference
        if self.kind == "ipo":
            scores = scores / counts
        losses = _LOSSES[self.kind](self, scores)
        if self.sft_weight:
            losses = losses - self.sft_weight * means[:, 0]
        return OfPairs(losses, self.beta * scores.detach())

    def loss(self, logprobs: torch.Tensor, targets: PairTargets, num_pairs: float | torch.Tensor) -> PairLoss:
        """Return the loss of a micro-batch's pairs and the loss weights of its tokens.

        logprobs: of the targets, FP32 [N], 0 where they are not supervised.
        num_pairs: of the whole step.
        """
        documents, supervised = targets.documents, targets.ids.flatten() != IGNORED
        assert documents is not None  # the data are pairs
        counts = documents.sums(supervised.float())
        reference = None
        if self.needs_reference:
            assert targets.reference is not None  # the run has computed it
            reference = documents.sums(targets.reference.flatten())
        sums = documents.sums(logprobs).requires_grad_()
        with torch.enable_grad():
            losses, rewards = self.of_pairs(sums, counts, reference)
            loss = losses.sum() / num_pairs
        (slopes,) = torch.autograd.grad(loss, sums)
        weights = documents.spread(-slopes).masked_fill(~supervised, 0.0)
        margins = rewards[:, 0] - rewards[:, 1]
        metrics = {
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            "reward_margin": margins,
            "reward_accuracy": (margins > 0).float(),
        }
        return PairLoss(loss.detach(), {key: values.sum() / num_pairs for key, values in metrics.items()}, weights)


def _simpo(objective: PairObjective, means: torch.Tensor) -> torch.Tensor:
    """Return the loss of Y. Meng et al., "SimPO", 2024, equation 6."""
    return _sigmoid(objective, means[:, 0] - means[:, 1] - objective.gamma / objective.beta)


def _dpo(objective: PairObjective, ratios: torch.Tensor) -> torch.Tensor:
    """Return the loss of R. Rafailov et al., "Direct preference optimization", 2023, equation 7."""
    return _sigmoid(objective, ratios[:, 0] - ratios[:, 1])


def _sigmoid(objective: PairObjective, margins: torch.Tensor) -> torch.Tensor:
    """Return -log σ(β × margin), smoothed as in E. Mitchell, "A note on DPO with noisy preferences", 2023."""
    scaled, share = objective.beta * margins, objective.label_smoothing
    return -F.logsigmoid(scaled) * (1 - share) - F.logsigmoid(-scaled) * share


def _ipo(objective: PairObjective, ratios: torch.Tensor) -> torch.Tensor:
    """Return the loss of M. G. Azar et al., 2023 (arXiv:2310.12036), equation 17.

    ratios: means over tokens. Its authors used these, as TRL learned from them.
    """
    return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * objective.beta)) ** 2


def _hinge(objective: PairObjective, ratios: torch.Tensor) -> torch.Tensor:
    """Return the loss of Y. Zhao et al., "SLiC-HF", 2023, equation 1, with rewards relative to the reference."""
    return torch.relu(1 - objective.beta * (ratios[:, 0] - ratios[:, 1]))


def _orpo(objective: PairObjective, means: torch.Tensor) -> torch.Tensor:
    """Return the loss of J. Hong et al., "ORPO", 2024, equation 6."""
    bounded = means.clamp(max=LARGEST_MEAN)
    log_odds = bounded - _log1mexp(bounded)
    return -means[:, 0] - objective.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of negative numbers, without cancellation."""
    near = x > -0.693
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )


# By kind. They take the scores [P, 2] of answers: log-probabilities, relative to the reference or means over tokens.
_LOSSES: dict[PairKind, Callable[[PairObjective, torch.Tensor], torch.Tensor]] = {
    "dpo": _dpo, "ipo": _ipo, "hinge": _hinge, "simpo": _simpo, "orpo": _orpo,
}  # fmt: skip
