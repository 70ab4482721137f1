"""Computes GRPO and its kin over recorded answers, by the definitions of TRL's GRPOTrainer.

Each document is one answer. D: documents; N: tokens of a micro-batch, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatrain_ray.engine.objectives.logprob_objective import Documents, LogprobLoss, LogprobTargets, Mean
from megatrain_ray.io.batching.batch import BatchCounts
from megatrain_ray.io.tokens.token_files import ADVANTAGE, IGNORED, OLD_LOGPROBS, REFERENCE_LOGPROBS, SAMPLER_LOGPROB

MOST_LOG_RATIO = 20.0  # as in verl: exp of 89 is infinite, whose gradient is NaN even where the loss is clipped
PolicyLevel = Literal["token", "sequence"]
PolicyLoss = Literal["grpo", "dapo", "dr_grpo"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class PolicyObjective:
    """Defines what is minimised for answers with advantages. The names of the numbers are those of `train.policy`.

    answer_length: tokens that dr_grpo divides the sum over an answer by.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    level: PolicyLevel = "token"
    loss_type: PolicyLoss = "dapo"
    answer_length: int = 1
    correction: Correction | None = None
    correction_min: float | None = None
    correction_max: float | None = 3.0

    def loss(self, logprobs: torch.Tensor, targets: LogprobTargets, counts: BatchCounts) -> LogprobLoss:
        """Return the loss over answers, and how far the policy is from the one that sampled. See `LogprobObjective`."""
        documents, learned = targets.documents, targets.ids.flatten() != IGNORED
        assert documents is not None  # the data are rollouts
        sampled, advantages = targets.columns[SAMPLER_LOGPROB].flatten(), targets.columns[ADVANTAGE].flatten()
        reference = _flat(targets.columns.get(REFERENCE_LOGPROBS, targets.reference))
        old_model = _flat(targets.columns.get(OLD_LOGPROBS, targets.reference))  # read only with a correction
        # A token that the sampler gave no log-probability has the policy's own: its ratio is 1.
        sampled = torch.where(sampled.isnan(), logprobs if self.correction is None else _given(old_model), sampled)
        old, correction = sampled, None
        if self.correction is not None:
            old = _given(old_model)
            correction = self._corrected((old - sampled).masked_fill(~learned, 0.0), documents)
        lengths = documents.sums(learned.float())
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            ratios = self._ratios((leaf - old).masked_fill(~learned, 0.0), documents, lengths)
            clipped = ratios.clamp(1 - self.clip_low, 1 + self.clip_high)
            losses = -torch.min(ratios * advantages, clipped * advantages)
            if correction is not None:
                losses = losses * correction
            kl = None
            if self.beta:
                kl = _k3(_given(reference) - leaf) * ratios  # the ratio makes its gradient that of the reverse KL
                losses = losses + self.beta * kl
            loss = self._mean(losses.masked_fill(~learned, 0.0), documents, lengths, counts)
        (slopes,) = torch.autograd.grad(loss.share, leaf)
        ratios = ratios.detach()
        of_tokens = {
            "clipped_low": ((ratios < 1 - self.clip_low) & (advantages < 0)).float(),
            "clipped_high": ((ratios > 1 + self.clip_high) & (advantages > 0)).float(),
            "cross_entropy": -logprobs,
            **({} if kl is None else {"kl": kl.detach()}),
        }
        metrics = {
            name: Mean(values.masked_fill(~learned, 0.0).sum(), counts.tokens) for name, values in of_tokens.items()
        }
        # The largest ratio of a token to the sampler, before clipping. In the first update after a sampling it says how
        # far the sampler computes otherwise.
        to_sampler = (logprobs - sampled).clamp(max=MOST_LOG_RATIO).exp()
        metrics["ratio_max"] = Mean(to_sampler.masked_fill(~learned, 0.0).max(), 1)
        weights = (-slopes).masked_fill(~learned, 0.0)
        return LogprobLoss(Mean(loss.total.detach(), loss.divisor), metrics, weights)

    def _ratios(self, differences: torch.Tensor, documents: Documents, lengths: torch.Tensor) -> torch.Tensor:
        """Return the importance ratio of each token, [N]: its own, or its answer's (C. Zheng et al., "GSPO", 2025)."""
        if self.level == "sequence":
            differences = documents.spread(documents.sums(differences) / lengths)
        return differences.clamp(max=MOST_LOG_RATIO).exp()

    def _corrected(self, differences: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Return the old policy's ratio to the sampler for each token, [N], bounded. differences: of logprobs, [N]."""
        assert self.correction is not None
        level, way = self.correction.split("_")
        if level == "sequence":
            differences = documents.spread(documents.sums(differences))
        ratios = differences.clamp(max=MOST_LOG_RATIO).exp()
        if way == "truncate":
            return ratios.clamp(self.correction_min, self.correction_max)
        least = 0.0 if self.correction_min is None else self.correction_min
        most = float("inf") if self.correction_max is None else self.correction_max
        return ratios.masked_fill((ratios < least) | (ratios > most), 0.0)

    def _mean(self, losses: torch.Tensor, documents: Documents, lengths: torch.Tensor, counts: BatchCounts) -> Mean:
        """Return the mean of the tokens' losses over the step. losses: [N], 0 where a token is not learned."""
        if self.loss_type == "grpo":
            return Mean((documents.sums(losses) / lengths).sum(), counts.documents)
        return Mean(losses.sum(), counts.tokens if self.loss_type == "dapo" else counts.documents * self.answer_length)


def _k3(differences: torch.Tensor) -> torch.Tensor:
    """Return the estimate of a KL divergence that J. Schulman calls k3. differences: log r of each token."""
    return differences.clamp(max=MOST_LOG_RATIO).exp() - differences - 1


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.flatten()


def _given(reference: torch.Tensor | None) -> torch.Tensor:
    assert reference is not None  # the run has computed it
    return reference
