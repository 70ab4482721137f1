"""Computes the objective of a reward model, whose head gives every token a score. A document's is its last token's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatrain_ray.engine.objectives.logprob_objective import LogprobLoss, LogprobTargets, Mean
from megatrain_ray.engine.objectives.pair_objective import reward_metrics
from megatrain_ray.io.batching.batch import MARGINS, BatchCounts


@dataclass(frozen=True)
class RewardObjective:
    """Defines what is minimised for each pair of a chosen and a rejected answer.

    This is -log σ(chosen - rejected - margin), the model of R. A. Bradley and M. E. Terry, 1952, with the margin of
    H. Touvron et al., "Llama 2", 2023, equation 2. A weight of the squared sum of both keeps scores near zero
    (J. Eisenstein et al., "Helping or herding?", 2023).
    """

    center_rewards_coefficient: float = 0.0

    def loss(self, scores: torch.Tensor, targets: LogprobTargets, counts: BatchCounts) -> LogprobLoss:
        """Return the mean loss over pairs, and rewards, as `LogprobObjective` for scores in place of log-probabilities.

        scores: of all tokens, FP32 [N].
        """
        documents, num_pairs = targets.documents, counts.documents // 2
        assert documents is not None  # the data are pairs
        scores = scores.detach().requires_grad_()
        with torch.enable_grad():
            rewards = documents.lasts(scores).view(-1, 2)
            ahead = rewards[:, 0] - rewards[:, 1]
            if MARGINS in targets.columns:
                ahead = ahead - documents.firsts(targets.columns[MARGINS].flatten())[::2]
            losses = -F.logsigmoid(ahead)
            if self.center_rewards_coefficient:
                losses = losses + self.center_rewards_coefficient * (rewards[:, 0] + rewards[:, 1]) ** 2
            loss = Mean(losses.sum(), num_pairs)
        (slopes,) = torch.autograd.grad(loss.share, scores)
        return LogprobLoss(Mean(loss.total.detach(), num_pairs), reward_metrics(rewards.detach(), num_pairs), -slopes)
