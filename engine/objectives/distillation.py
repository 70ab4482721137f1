"""Computes how far a student is from a teacher, of which the likeliest tokens of each position are known.

t: tokens; V: vocabulary; k: tokens that are known; c: k, or k + 1 if the vocabulary has others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F


class TopLogprobs(NamedTuple):
    """Holds what a teacher predicts at each position.

    ids: int32 [..., k], ascending.
    logprobs: FP32 [..., c]: of these tokens, and of all others together.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Softmax:
    """Says how scores become probabilities.

    vocab_size: ids that both models have. Scores of others, which pad a table of embeddings, are left out.
    """

    temperature: float
    vocab_size: int

    def logprobs_of(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of tokens, and of all others together, [t, c].

        The others' is a logsumexp over them: 1 - the sum of the rest would be rounding only where they are unlikely.

        scores: FP32 [t, V].
        ids: int64 [t, k].
        """
        scores = scores[:, : self.vocab_size]
        if self.temperature != 1:
            scores = scores / self.temperature
        known = scores.gather(-1, ids)
        if ids.shape[-1] < self.vocab_size:
            others = torch.logsumexp(scores.scatter(-1, ids, -math.inf), -1, keepdim=True)
            known = torch.cat([known, others], -1)
        return torch.log_softmax(known, -1)


@dataclass(frozen=True)
class TopTokens:
    """Says what of a teacher's predictions is recorded: the `num_ids` likeliest tokens, or the whole vocabulary."""

    num_ids: int
    softmax: Softmax

    @property
    def num_logprobs(self) -> int:
        return self.num_ids + (self.num_ids < self.softmax.vocab_size)

    def zeros(self, like: torch.Tensor) -> TopLogprobs:
        """Return predictions of nothing for each element of `like`, on its device."""
        ids = like.new_zeros((*like.shape, self.num_ids), dtype=torch.int32)
        return TopLogprobs(ids, ids.new_zeros((*like.shape, self.num_logprobs), dtype=torch.float32))

    def records(self, scores: torch.Tensor) -> torch.Tensor:
        """Return ids and log-probabilities of each position: FP32 [t, k + c]. Those of ids are the bits of an int32.

        scores: FP32 [t, V].
        """
        likeliest = torch.topk(scores[:, : self.softmax.vocab_size], self.num_ids, sorted=False).indices
        ids = likeliest.sort().values
        return torch.cat([ids.int().view(torch.float32), self.softmax.logprobs_of(scores, ids)], -1)


@dataclass(frozen=True)
class Distillation:
    """Defines the divergence of a student from a teacher: R. Agarwal et al., 2023 (arXiv:2306.13649), equation 1.

    beta: 0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between: Jensen-Shannon, generalised.
    sft_weight: of the targets' cross-entropy, which is added.
    """

    softmax: Softmax
    beta: float = 0.0
    sft_weight: float = 0.0

    def divergences(self, scores: torch.Tensor, teacher: TopLogprobs) -> torch.Tensor:
        """Return the divergence of each position, [t]. Differentiable by `scores`.

        All tokens that the teacher's record does not name count as one. So this is at most the divergence over the
        whole vocabulary, and is that if the record names all of it.

        scores: FP32 [t, V].
        """
        of_teacher, of_student = teacher.logprobs, self.softmax.logprobs_of(scores, teacher.ids.long())
        if self.beta == 0:
            return _kl(of_teacher, of_student).sum(-1)
        if self.beta == 1:
            return _kl(of_student, of_teacher).sum(-1)
        beta = float(np.float32(self.beta))  # TRL computes with it in FP32
        weighted = [of_student + math.log1p(-beta), of_teacher + math.log(beta)]
        mixture = torch.logsumexp(torch.stack(weighted), 0)
        return (beta * _kl(of_teacher, mixture) + (1 - beta) * _kl(of_student, mixture)).sum(-1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the terms of KL(p ‖ q), by log-probabilities: [t, c]."""
    return F.kl_div(q, p, reduction="none", log_target=True)
