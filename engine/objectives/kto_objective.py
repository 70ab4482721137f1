"""Computes objectives over single answers that are labelled good or bad.

D: documents; N: tokens of a micro-batch, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatrain_ray.engine.objectives.logprob_objective import LogprobLoss, LogprobTargets, Mean
from megatrain_ray.io.batching.batch import LABELS, BatchCounts
from megatrain_ray.io.tokens.token_files import IGNORED

KtoKind = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True)
class KtoObjective:
    """Defines what is minimised for each labelled answer.

    kto: K. Ethayarajh et al., "KTO", 2024 (arXiv:2402.01306), equation 7.
    apo_zero_unpaired: the same without KL, as TRL has it of K. D'Oosterlinck et al., 2024 (arXiv:2408.06266).

    The names of the first numbers are those of `train.preference`. The others are of one step, or held-out batch.

    kl: by how much the model's log-probabilities of mismatched answers exceed the reference's, on average, but at
        least 0.
    num_good: good answers.
    """

    kind: KtoKind
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0
    num_good: int = 0

    @property
    def estimates_kl(self) -> bool:
        return self.kind == "kto"

    def with_kl(self, logprobs: torch.Tensor, mismatched: LogprobTargets) -> KtoObjective:
        """Return the objective of a step. logprobs: of the targets of all its mismatched answers, FP32 [N]."""
        return replace(self, kl=_ratios(logprobs, mismatched).mean().clamp(min=0).item())

    def with_counts(self, targets: LogprobTargets) -> KtoObjective:
        """Return the objective of a step with these targets."""
        return replace(self, num_good=int(_are_good(targets).sum()))

    def loss(self, logprobs: torch.Tensor, targets: LogprobTargets, counts: BatchCounts) -> LogprobLoss:
        """Return the mean loss over answers, KL, and the mean rewards of good and of bad ones. See LogprobObjective."""
        documents, are_good = targets.documents, _are_good(targets)
        assert documents is not None
        with torch.enable_grad():
            ratios = _ratios(logprobs, targets).requires_grad_()
            distances = torch.where(are_good, ratios - self.kl, self.kl - ratios)
            factors = torch.where(are_good, self.desirable_weight, self.undesirable_weight)
            loss = Mean((factors * (1 - torch.sigmoid(self.beta * distances))).sum(), counts.documents)
        (slopes,) = torch.autograd.grad(loss.share, ratios)
        weights = documents.spread(-slopes).masked_fill(targets.ids.flatten() == IGNORED, 0.0)
        rewards = self.beta * ratios.detach()
        metrics = {
            "reward_chosen": Mean(rewards[are_good].sum(), self.num_good),
            "reward_rejected": Mean(rewards[~are_good].sum(), counts.documents - self.num_good),
        }
        if self.estimates_kl:
            metrics["kl"] = Mean(rewards.new_tensor(self.kl * len(rewards)), counts.documents)
        return LogprobLoss(Mean(loss.total.detach(), counts.documents), metrics, weights)


def _ratios(logprobs: torch.Tensor, targets: LogprobTargets) -> torch.Tensor:
    """Return by how much the log-probability of each document exceeds the reference's, [D]."""
    assert targets.documents is not None and targets.reference is not None  # the run has computed it
    return targets.documents.sums(logprobs) - targets.documents.sums(targets.reference.flatten())


def _are_good(targets: LogprobTargets) -> torch.Tensor:
    """Return whether each document is a good answer, bool [D]."""
    assert targets.documents is not None
    return targets.documents.sums(targets.columns[LABELS].flatten()) > 0
