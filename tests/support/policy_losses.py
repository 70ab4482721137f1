"""Computes GRPO's losses in plain PyTorch, answer by answer, by the formulas of TRL 1.16's GRPOTrainer."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Policy(NamedTuple):
    """Names a loss over rollouts and its numbers."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    level: str = "token"
    loss_type: str = "dapo"
    answer_length: int = 1
    correction: str | None = None
    correction_min: float | None = None
    correction_max: float | None = 3.0


class Rollouts(NamedTuple):
    """Holds what a micro-batch's rollouts have beside their tokens. positions, real: [B, T]; the others are [N]."""

    positions: Tensor
    real: Tensor
    sampled: Tensor
    advantages: Tensor
    reference: Tensor | None


def policy_loss(logits: Tensor, targets: Tensor, of: Rollouts, policy: Policy, counts: tuple[int, int]) -> Tensor:
    """Return the share of a micro-batch in the loss of a step.

    logits: FP32 [N, V], row after row.
    targets: [N], -100 where not learned.
    counts: answers and learned tokens of the step.
    """
    logprobs, learned = -F.cross_entropy(logits, targets, reduction="none", ignore_index=-100), targets != -100
    begins = [*torch.nonzero(of.positions.flatten() == 0).flatten().tolist(), targets.numel()]
    spans = [slice(*ends) for ends in itertools.pairwise(begins)]
    parts = []  # of each document, and of pads
    for span in spans:
        given = None if of.reference is None else of.reference[span]
        losses = _losses(logprobs[span], of.sampled[span], of.advantages[span], given, learned[span], policy)
        parts.append(losses.masked_fill(~learned[span], 0.0))
    if policy.loss_type == "grpo":
        of_answers = [
            part.sum() / learned[span].sum() for part, span in zip(parts, spans, strict=True) if learned[span].any()
        ]
        return torch.stack(of_answers).sum() / counts[0]
    return torch.cat(parts).sum() / (counts[1] if policy.loss_type == "dapo" else counts[0] * policy.answer_length)


def _losses(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, reference: Tensor | None, learned: Tensor, policy: Policy
) -> Tensor:
    """Return the loss of each token of a document. learned: which of them are learned."""
    old = logprobs.detach() if policy.correction is None else reference
    assert old is not None
    sampled = torch.where(sampled.isnan(), old, sampled)
    if policy.correction is None:
        old = sampled
    log_ratios = (logprobs - old).masked_fill(~learned, 0.0)
    if policy.level == "sequence":
        log_ratios = (log_ratios.sum() / learned.sum().clamp(min=1)).expand(len(log_ratios))
    ratios = torch.exp(log_ratios)
    clipped = torch.clamp(ratios, 1 - policy.clip_low, 1 + policy.clip_high)
    losses = -torch.min(ratios * advantages, clipped * advantages)
    if policy.correction is not None:
        differences = (old - sampled).masked_fill(~learned, 0.0)
        if policy.correction.startswith("sequence"):
            differences = differences.sum().expand(len(differences))
        correction, low, high = torch.exp(differences), policy.correction_min or 0.0, policy.correction_max
        high = float("inf") if high is None else high
        if policy.correction.endswith("mask"):
            correction = torch.where((correction < low) | (correction > high), 0.0, correction)
        else:
            correction = torch.clamp(correction, low, high)
        losses = losses * correction
    if policy.beta:
        assert reference is not None
        above = reference - logprobs
        losses = losses + policy.beta * ((torch.exp(above) - above - 1) * ratios)
    return losses
