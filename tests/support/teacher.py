"""Computes divergences from a teacher in plain PyTorch: that of TRL 1.16's GKDTrainer, and one over top tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain_ray.io.batching.batch import Batch
from tests.support.tiny import VOCAB_SIZE, build_tiny


class Distil(NamedTuple):
    """Names a divergence from a teacher and its numbers."""

    beta: float = 0.0
    temperature: float = 1.0
    sft_weight: float = 0.0


def gkd_losses(student: Tensor, teacher: Tensor, of: Distil) -> Tensor:
    """Return the divergence of each position, as `generalized_jsd_loss` of TRL 1.16 computes it before its sum.

    student: logits, [N, V].
    teacher: log-probabilities of the teacher's logits ÷ temperature, [N, V].
    """
    student = F.log_softmax(student / of.temperature, dim=-1)
    return _jsd(student, teacher, of.beta).sum(-1)


def top_losses(student: Tensor, ids: Tensor, teacher: Tensor, of: Distil) -> Tensor:
    """Return the divergence of each position over the tokens of `ids` [N, k], and one more that stands for all others.

    student: logits, [N, V].
    teacher: log-probabilities of these tokens, and of all others together, [N, k + 1].
    """
    scaled = student / of.temperature
    others = scaled.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    return _jsd(F.log_softmax(torch.cat([scaled.gather(-1, ids), others], -1), -1), teacher, of.beta).sum(-1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return what TRL sums."""
    if beta == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True)
    if beta == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True)
    weight = torch.tensor(beta, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-weight), teacher + torch.log(weight)]), dim=0)
    kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return weight * kl_teacher + (1 - weight) * kl_student


def plain_objective(logits: Tensor, targets: Any, predicted: tuple[Tensor, Tensor], of: Distil) -> Tensor:
    """Return the sum over the supervised tokens, each times its weight.

    targets: ids and loss weights, [N] each.
    predicted: the teacher's, as in a batch, row after row.
    """
    (ids, weights), (tokens, teacher) = targets, predicted
    if tokens.shape[-1] == logits.shape[-1]:
        losses = gkd_losses(logits, teacher, of)
    else:
        losses = top_losses(logits, tokens.long(), teacher, of)
    losses = losses.masked_fill(ids == -100, 0.0)
    total = losses.sum() if weights is None else (losses * weights).sum()
    if of.sft_weight:
        plain = F.cross_entropy(logits, ids, ignore_index=-100, reduction="sum" if weights is None else "none")
        total = total + of.sft_weight * (plain if weights is None else (plain * weights).sum())
    return total


def taught(folder: Path, batches: Sequence[Any], top_k: int, temperature: float = 1.0) -> list[Batch]:
    """Return batches with the predictions of a tiny model of other weights, which is written to `folder`."""
    build_tiny(folder, seed=1)
    return [replace(batch, teacher=predicted_by(folder, batch, top_k, temperature)) for batch in batches]


def predicted_by(folder: Path, batch: Any, top_k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return what the model of a folder predicts of a batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    packed = {} if batch.positions is None else {"position_ids": batch.positions}
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False, **packed).logits
    return predictions(logits, batch.targets, top_k, temperature)


def predictions(logits: Tensor, targets: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the ids of the likeliest tokens, ascending, and log-probabilities of these and of all others together."""
    logprobs = F.log_softmax(logits / temperature, -1)
    ids = logprobs.topk(top_k).indices.sort().values
    known = logprobs.gather(-1, ids)
    if top_k < VOCAB_SIZE:
        rest = logprobs.exp().double().scatter(-1, ids, 0.0).sum(-1, keepdim=True).log().float()
        known = torch.cat([known, rest], -1)
    ignored = (targets == -100)[..., None]
    return ids.int().masked_fill(ignored, 0), known.masked_fill(ignored, 0.0)
