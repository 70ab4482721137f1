"""Computes losses over pairs of answers in plain PyTorch, by the formulas of TRL 1.16 and LLaMA-Factory 0.9.

TRL's DPOTrainer: sigmoid (label smoothing as in CPOTrainer), ipo, hinge. CPOTrainer: simpo. ORPOTrainer: orpo, whose
cross-entropy is of the answer here, as in the paper and in LLaMA-Factory, and of the prompt as well in TRL.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Preference(NamedTuple):
    """Names a loss over pairs and its numbers."""

    kind: str
    beta: float = 0.1
    gamma: float = 0.5
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    center_rewards_coefficient: float = 0.0  # of a reward model


def pair_losses(
    logits: Tensor,
    targets: Tensor,
    positions: Tensor | None,
    real: Any,
    of: Preference,
    reference: Tensor | None = None,
) -> Tensor:
    """Return the loss of each pair of a micro-batch.

    logits: FP32 [N, V], row after row.
    targets: [N], -100 where not supervised.
    positions, real: [B, T], as in a batch. positions is None if each row is one document.
    reference: log-probabilities of the targets by the reference model, [N].
    """
    log_p = -F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    spans = [slice(*ends) for ends in document_ends(positions, real)]

    def both(values: Tensor) -> Any:
        return torch.stack([values[span].sum() for span in spans]).view(-1, 2).unbind(1)

    (chosen, rejected), (n_chosen, n_rejected) = both(log_p), both((targets != -100).float())
    ref_chosen, ref_rejected = (0, 0) if reference is None else both(reference)
    means = chosen / n_chosen, rejected / n_rejected
    nll = -means[0]
    if of.kind == "simpo":
        logits = means[0] - means[1] - of.gamma / of.beta
    elif of.kind == "ipo":
        logits = (chosen - ref_chosen) / n_chosen - (rejected - ref_rejected) / n_rejected
    else:
        logits = (chosen - ref_chosen) - (rejected - ref_rejected)
    if of.kind == "orpo":
        odds = [mean - torch.log1p(-torch.exp(mean)) for mean in means]
        return nll - of.beta * F.logsigmoid(odds[0] - odds[1])
    losses = {
        "dpo": lambda: _sigmoid(of, logits),
        "simpo": lambda: _sigmoid(of, logits),
        "ipo": lambda: (logits - 1 / (2 * of.beta)) ** 2,
        "hinge": lambda: torch.relu(1 - of.beta * logits),
    }[of.kind]()
    return losses + of.sft_weight * nll


def reward_losses(
    scores: Tensor, positions: Tensor | None, real: Any, margins: Tensor | None, of: Preference
) -> Tensor:
    """Return the loss of each pair of a micro-batch by the scores of all tokens, as TRL 1.16's RewardTrainer.

    scores: FP32 [N], row after row.
    positions, real, margins: [B, T], as in a batch.
    """
    spans = document_ends(positions, real)
    chosen, rejected = scores[[end - 1 for _, end in spans]].view(-1, 2).unbind(1)
    ahead = chosen - rejected
    if margins is not None:
        ahead = ahead - margins.flatten()[[begin for begin, _ in spans[::2]]]
    losses = -F.logsigmoid(ahead)
    if of.center_rewards_coefficient:
        losses = losses + of.center_rewards_coefficient * (chosen + rejected) ** 2
    return losses


def document_ends(positions: Tensor | None, real: Any) -> list[tuple[int, int]]:
    """Return where the documents of rows begin and end in their tokens."""
    if positions is None:
        positions = torch.arange(real.shape[1]).expand_as(real) - real.sum(1, keepdim=True) * ~real
    begins = [*torch.nonzero(positions.flatten() == 0).flatten().tolist(), real.numel()]
    return [ends for ends in itertools.pairwise(begins) if bool(real.flatten()[ends[0]])]


def _sigmoid(of: Preference, logits: Tensor) -> Tensor:
    share = of.label_smoothing
    return -F.logsigmoid(of.beta * logits) * (1 - share) - F.logsigmoid(-of.beta * logits) * share
