"""Computes head and loss over one chunk of tokens at a time, each with its gradient.

So the logits of all tokens never exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatrain_ray.engine.objectives.distillation import Distillation, TopLogprobs, TopTokens
from megatrain_ray.engine.objectives.logprob_objective import Documents, LogprobObjective
from megatrain_ray.io.tokens.token_files import IGNORED


class Targets(NamedTuple):
    """Holds what tokens are to predict, and how much each of them counts in the loss.

    ids: int64, `IGNORED` where a token does not count. [B, T], or [t] for a chunk of tokens.
    weights: FP32, of the same shape, 0 where a token does not count; None: all others count 1.
    real: bool, of the same shape, which inputs are no pads; None: all, or not known, as in a chunk.
    documents: where documents lie; None: the objective asks for single tokens, or this is a chunk.
    reference: FP32, of the same shape, log-probabilities by a reference model; None: there is none, or this is a chunk.
    columns: as `Batch.columns`; empty in a chunk.
    teacher: what a teacher predicts, [B, T, …], or [t, …] for a chunk; None: there is none.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None = None
    real: torch.Tensor | None = None
    documents: Documents | None = None
    reference: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = {}
    teacher: TopLogprobs | None = None

    def chunks(self, num_tokens: int) -> list[Targets]:
        """Return chunks of `num_tokens` tokens, in the order of rows."""
        chunks = [Targets(ids) for ids in torch.split(self.ids.reshape(-1), num_tokens)]
        if self.weights is not None:
            parts = torch.split(self.weights.reshape(-1), num_tokens)
            chunks = [chunk._replace(weights=part) for chunk, part in zip(chunks, parts, strict=True)]
        if self.teacher is not None:
            of_teacher = zip(*(torch.split(tensor.flatten(0, -2), num_tokens) for tensor in self.teacher), strict=True)
            chunks = [c._replace(teacher=TopLogprobs(*part)) for c, part in zip(chunks, of_teacher, strict=True)]
        return chunks


@dataclass(frozen=True)
class Objective:
    """Defines what is minimised for each supervised token: cross-entropy, and optional terms.

    Each token's sum of these is multiplied by its loss weight. `logprob_objective` takes the place of all of them, and
    `distillation` of the cross-entropy.
    """

    # Weight of logsumexp(logits)², which keeps logits near zero (A. Chowdhery et al., "PaLM", 2022, section 5).
    z_loss: float = 0.0
    # Targets are smoothed as by torch.nn.CrossEntropyLoss (C. Szegedy et al., "Rethinking the inception architecture
    # for computer vision", 2016).
    label_smoothing: float = 0.0
    logprob_objective: LogprobObjective | None = None
    distillation: Distillation | None = None

    @property
    def is_cross_entropy(self) -> bool:
        terms = self.z_loss, self.label_smoothing, self.logprob_objective, self.distillation
        return not any(terms)

    def sums(self, scores: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sums of the objective and, without a graph, of the plain cross-entropy.

        scores: FP32 [1, t, V].
        targets: of t tokens.
        """
        if self.distillation is not None:
            return _distillation_sums(self.distillation, scores, targets)
        total = _cross_entropy(scores, targets, self.label_smoothing)
        plain = _cross_entropy(scores.detach(), targets) if self.label_smoothing else total.detach()
        if self.z_loss:
            log_z = torch.logsumexp(scores.view(targets.ids.shape[0], -1), -1).masked_fill(targets.ids == IGNORED, 0.0)
            total = total + self.z_loss * _weighted_sum(log_z.square(), targets.weights)
        return total, plain


class OpenSum(NamedTuple):
    """Holds a parameter's FP32 gradient sum over the step, to accumulate into."""

    total: torch.Tensor
    empty: bool  # the sum begins here; its current values are meaningless


@dataclass(frozen=True)
class LossResult:
    """Holds the losses and gradients of one micro-batch."""

    losses: list[torch.Tensor]  # for each chunk its share of the step's loss
    cross_entropies: list[torch.Tensor]  # for each chunk its share of the step's plain cross-entropy
    hidden: torch.Tensor | None  # gradient of the hidden state; None if it needs none
    # Gradients of the head's parameters. None for one that needs none, that got none, or whose gradient was added to a
    # sum.
    parameters: list[torch.Tensor | None]


Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # as Device.add: total, value, out
ChunkSums = Callable[[Objective, torch.Tensor, Targets], tuple[torch.Tensor, torch.Tensor]]


def _add(total: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(total, value, out=out)


def chunk_sums(
    logits: Callable[[torch.Tensor], torch.Tensor], objective: Objective, hidden: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of the objective and of the plain cross-entropy over a chunk: two FP32 scalars.

    When this is compiled, the FP32 logits are never stored: the kernel that computes them sums over them at once.

    logits: [1, t, D] → [1, t, V].
    hidden: [1, t, D].
    targets: of t tokens.
    """
    return objective.sums(logits(hidden).float(), targets)


def chunked_loss(
    sums_of_chunk: Callable[[torch.Tensor, Targets], tuple[torch.Tensor, torch.Tensor]], hidden: torch.Tensor,
    targets: Targets, parameters: Sequence[torch.Tensor], *, chunk_tokens: int, total_weight: float | torch.Tensor,
    add: Add = _add, into: Sequence[OpenSum | None] = (),
) -> LossResult:  # fmt: skip
    """Return the weighted sum of the objective over supervised tokens ÷ `total_weight`, and its gradients.

    With several chunks the parameters' gradients are summed in FP32 in the order of the chunks and rounded once. With
    one chunk they are as autograd made them.

    sums_of_chunk: `chunk_sums` with `logits` and `objective` bound; it computes with `parameters`.
    hidden: [B, T, D].
    targets: [B, T].
    total_weight: sum of the loss weights of the whole step; without weights, its number of supervised tokens.
    add: as Device.add.
    into: for each of `parameters` a sum that its gradients are added to as they come, or None. It may be empty.
    """
    tokens = hidden.detach().reshape(1, -1, hidden.shape[-1])
    chunks = range(0, tokens.shape[1], chunk_tokens)
    losses, cross_entropies = [], []
    hidden_gradient = torch.empty_like(tokens) if hidden.requires_grad else None
    sums = GradientSums(into or [None] * len(parameters), add, several=len(chunks) > 1)
    for start, of_targets in zip(chunks, targets.chunks(chunk_tokens), strict=True):
        chunk = tokens[:, start : start + chunk_tokens].detach().requires_grad_(hidden.requires_grad)
        with torch.enable_grad():
            total, plain = sums_of_chunk(chunk, of_targets)
            loss = total / total_weight
        of_chunk, *of_parameters = gradients_of(loss, [chunk, *parameters])
        if hidden_gradient is not None:
            hidden_gradient[:, start : start + chunk_tokens] = 0 if of_chunk is None else of_chunk
        sums.add(of_parameters)
        del of_parameters  # else it would exist together with the next chunk's: twice the head's size
        losses.append(loss.detach())
        cross_entropies.append(plain / total_weight)
    of_hidden = None if hidden_gradient is None else hidden_gradient.view(hidden.shape)
    return LossResult(losses, cross_entropies, of_hidden, sums.rounded())


def gradients_of(
    output: torch.Tensor, sources: Sequence[torch.Tensor], slopes: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """Return the gradient by each source; None for one that needs none, or that the output does not depend on.

    slopes: derivatives of the loss by `output`; None: it is the loss.
    """
    wanted = [source for source in sources if source.requires_grad]
    # Nothing is wanted of a text if only modules that turn images into features are trained.
    found = iter(torch.autograd.grad(output, wanted, slopes, allow_unused=True) if wanted else ())
    return [next(found) if source.requires_grad else None for source in sources]


# FP32 scores [1, t, V] and t targets → FP32, joined along its first dimension.
OfChunk = Callable[[torch.Tensor, Targets], torch.Tensor]


def score_chunks(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: Targets, of_chunk: OfChunk, *,
    chunk_tokens: int,
) -> torch.Tensor:  # fmt: skip
    """Return what `of_chunk` makes of each chunk's scores, joined in the order of the chunks, without gradients.

    logits: [1, t, D] → [1, t, V].
    hidden, targets, chunk_tokens: as for chunked_loss.
    """
    tokens = hidden.reshape(1, -1, hidden.shape[-1])
    chunks = zip(torch.split(tokens, chunk_tokens, 1), targets.chunks(chunk_tokens), strict=True)
    with torch.no_grad():
        return torch.cat([of_chunk(logits(chunk).float(), of_targets) for chunk, of_targets in chunks])


def cross_entropy_sum(scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the weighted sum of the cross-entropy over the supervised tokens of a chunk, [1]."""
    return _cross_entropy(scores, targets)[None]


def objective_sums(objective: Objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the sums of the objective and of the plain cross-entropy of a chunk, [2]."""
    return torch.stack(objective.sums(scores, targets))


def target_logprobs(scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the log-probability of each target of a chunk, [t]; 0 where a token is not supervised."""
    return 0.0 - F.cross_entropy(scores[0], targets.ids, reduction="none", ignore_index=IGNORED)


def logprobs_and_entropies(scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return `target_logprobs` and the entropy of the model's distribution at each target, in nats: FP32 [t, 2].

    Both are 0 where a token is not supervised.
    """
    logprobs = target_logprobs(scores, targets)
    probabilities = scores[0].softmax(-1)  # made after and overwritten: no more memory than for the log-probabilities
    entropies = torch.special.entr(probabilities, out=probabilities).sum(-1)
    return torch.stack([logprobs, entropies.masked_fill(targets.ids == IGNORED, 0.0)], -1)


def top_records(top: TopTokens, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return each target's log-probability, and what `top` records of its position: FP32 [t, 1 + k + c].

    All are 0 where a token is not supervised.
    """
    records = top.records(scores[0]).masked_fill((targets.ids == IGNORED)[:, None], 0.0)
    return torch.cat([target_logprobs(scores, targets)[:, None], records], -1)


def _distillation_sums(
    distillation: Distillation, scores: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `Objective.sums` does."""
    assert targets.teacher is not None  # batches have what the run's teacher predicts
    divergences = distillation.divergences(scores[0], targets.teacher).masked_fill(targets.ids == IGNORED, 0.0)
    total = _weighted_sum(divergences, targets.weights)
    if not distillation.sft_weight:
        return total, _cross_entropy(scores.detach(), targets)
    plain = _cross_entropy(scores, targets)
    return total + distillation.sft_weight * plain, plain.detach()


def token_scores(scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the score that the head of a reward model gives each token of a chunk, [t]. scores: [1, t, 1]."""
    return scores[0, :, 0]


def _cross_entropy(scores: torch.Tensor, targets: Targets, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the weighted sum of the cross-entropy over the supervised tokens. scores: [1, t, V]."""
    flat = scores.view(-1, scores.shape[-1])
    reduction = "sum" if targets.weights is None else "none"
    found = F.cross_entropy(
        flat, targets.ids, reduction=reduction, ignore_index=IGNORED, label_smoothing=label_smoothing
    )
    return found if targets.weights is None else _weighted_sum(found, targets.weights)


def _weighted_sum(values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the sum over tokens. values, weights: [t]; None: each token counts 1."""
    return (values if weights is None else values * weights).sum()


class GradientSums:
    """Accumulates the gradients of weights over chunks of tokens."""

    def __init__(self, into: Sequence[OpenSum | None], add: Add = _add, *, several: bool) -> None:
        """Create empty sums.

        into: for each weight the sum that its gradients are added to; None: a sum of its own.
        several: whether there is more than one chunk. Then sums of their own are FP32.
        """
        self._into = into
        self._sums: list[torch.Tensor | None] = [None if to is None or to.empty else to.total for to in into]
        self._dtypes: list[torch.dtype | None] = [None] * len(into)
        self._add = add
        self._several = several

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for i, (into, gradient) in enumerate(zip(self._into, gradients, strict=True)):
            if gradient is None:
                continue
            before = self._sums[i]
            self._dtypes[i] = gradient.dtype
            if before is not None:
                self._add(before, gradient, before)
            elif into is not None:
                self._sums[i] = into.total.copy_(gradient)
            else:
                self._sums[i] = gradient.float() if self._several else gradient

    def rounded(self) -> list[torch.Tensor | None]:
        """Return the gradient of each weight, rounded to its type; None if it went into a sum or there is none."""
        for into, total in zip(self._into, self._sums, strict=True):
            if into is not None and total is None:  # the sum was to begin here and got no gradient
                into.total.zero_()
        return [
            None if into is not None or total is None else total.to(dtype)
            for into, total, dtype in zip(self._into, self._sums, self._dtypes, strict=True)
        ]
