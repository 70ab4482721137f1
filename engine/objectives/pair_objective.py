"""Computes objectives over pairs of answers, from the sums of the log-probabilities of their tokens.

P: pairs; N: tokens of a micro-batch, row after row. Each two documents are a pair, the chosen one first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from megatrain_ray.engine.objectives.logprob_objective import LogprobLoss, LogprobTargets, Mean
from megatrain_ray.io.batching.batch import BatchCounts
from megatrain_ray.io.tokens.token_files import IGNORED

PairKind = Literal["dpo", "ipo", "hinge", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")  # their rewards are means over tokens, relative to no model
LARGEST_MEAN = -1e-7  # of log-probabilities of which ORPO takes the odds: those of a certain answer are infinite


class PairLosses(NamedTuple):
    """Holds the losses and rewards of pairs."""

    losses: torch.Tensor  # [P]
    rewards: torch.Tensor  # [P, 2]


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

    def of_pairs(self, sums: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor | None = None) -> PairLosses:
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
        return PairLosses(losses, self.beta * scores.detach())

    def loss(self, logprobs: torch.Tensor, targets: LogprobTargets, counts: BatchCounts) -> LogprobLoss:
        """Return the mean loss over pairs, and rewards. See `LogprobObjective`."""
        documents, supervised, num_pairs = targets.documents, targets.ids.flatten() != IGNORED, counts.documents // 2
        assert documents is not None  # the data are pairs
        lengths = documents.sums(supervised.float()).view(-1, 2)
        reference = None
        if self.kind not in WITHOUT_REFERENCE:
            assert targets.reference is not None  # the run has computed it
            reference = documents.sums(targets.reference.flatten()).view(-1, 2)
        sums = documents.sums(logprobs).view(-1, 2).requires_grad_()
        with torch.enable_grad():
            losses, rewards = self.of_pairs(sums, lengths, reference)
            loss = Mean(losses.sum(), num_pairs)
        (slopes,) = torch.autograd.grad(loss.share, sums)
        weights = documents.spread(-slopes.flatten()).masked_fill(~supervised, 0.0)
        return LogprobLoss(Mean(loss.total.detach(), num_pairs), reward_metrics(rewards, num_pairs), weights)


def reward_metrics(rewards: torch.Tensor, num_pairs: int) -> dict[str, Mean]:
    """Return what is known of a micro-batch's pairs. rewards: FP32 [P, 2]. num_pairs: of the whole step."""
    margins = rewards[:, 0] - rewards[:, 1]
    metrics = {
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
        "reward_margin": margins,
        "reward_accuracy": (margins > 0).float(),
    }
    return {name: Mean(values.sum(), num_pairs) for name, values in metrics.items()}


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
