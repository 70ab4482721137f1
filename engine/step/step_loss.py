"""Computes a micro-batch's loss and its gradients together, in the visit to the head. Compute thread only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.gradients.interfaces import GradientAccumulator
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layout.flat_layout import Segment
from megatrain_ray.engine.model.chunked_loss import (
    LossResult,
    Objective,
    OpenSum,
    Targets,
    chunked_loss,
    gradients_of,
    logprobs_and_entropies,
    score_chunks,
    target_logprobs,
)
from megatrain_ray.engine.objectives.logprob_objective import LogprobLoss, Mean
from megatrain_ray.engine.objectives.policy_objective import PolicyObjective
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.io.batching.batch import BatchCounts
from megatrain_ray.virtual_clock import Op

Named = list[tuple[Segment, torch.Tensor]]  # parameters of the head's modules


@dataclass(frozen=True)
class LossShare:
    """Says what a micro-batch's loss is a share of. All numbers are of the step over all ranks."""

    objective: Objective
    total_weight: float | torch.Tensor  # as in `StepInput`
    num_parts: int  # micro-batches
    counts: BatchCounts | None = None  # as in `StepInput`


@dataclass(frozen=True)
class MicroBatchLoss:
    """Holds the loss of one micro-batch and the gradients of the head.

    losses: shares of the step's loss, one a chunk, or one of all documents; then one for side outputs if there are any.
    metrics: by name, shares of the step's: the plain cross-entropies of the chunks, or what is known of the documents.
    gradients: by parameter name; None if nothing flowed, or if the gradient was already added to the step's sum.
    """

    losses: list[torch.Tensor]
    metrics: dict[str, list[torch.Tensor]]
    gradients: dict[str, torch.Tensor | None]


class StepLoss:
    """Calls the model's own norm, head and loss in chunks of tokens."""

    def __init__(self, plan: Plan, device: Device, model: BoundModel, gradients: GradientAccumulator) -> None:
        self._plan = plan
        self._device = device
        self._model = model
        self._gradients = gradients
        self._head = len(plan.layers) - 1

    @property
    def compiled(self) -> CompiledCall | None:
        """Return the loss function if it is to be compiled before the first step, else None."""
        sums = self._model.chunk_sums
        return sums if isinstance(sums, CompiledCall) else None

    def run(self, j: int, forward_pass: ForwardPass, targets: Targets, share: LossShare) -> MicroBatchLoss:
        """Compute the loss of micro-batch `j` and send the gradient of its hidden state into the forward pass.

        forward_pass: has run all calls except the head's own modules.
        targets: [B, T].
        """
        hidden = forward_pass.final_hidden
        with self._bound() as named:
            with self._device.compute(Op("loss", self._head, j)):
                if share.objective.logprob_objective is None:
                    result = self._chunked(hidden, targets, named, share)
                    losses, metrics = [*result.losses], {"cross_entropy": result.cross_entropies}
                else:
                    compute = self._of_scores if self._model.structure.is_reward else self._of_logprobs
                    result, found = compute(hidden, targets, named, share)
                    losses, metrics = (
                        [found.loss.share],
                        {name: [mean.share] for name, mean in found.metrics.items() if mean.divisor},
                    )
            auxiliary = self._model.proxied.auxiliary(forward_pass.result, targets.real)
        forward_pass.send(hidden, result.hidden)
        if auxiliary is not None:  # averaged over the step's micro-batches: this term is no sum over tokens
            forward_pass.send(auxiliary, torch.full_like(auxiliary, 1 / share.num_parts))
            losses.append(auxiliary.detach() / share.num_parts)
        forward_pass.result = None
        gradients = {s.tied_to or s.name: g for (s, _), g in zip(named, result.parameters, strict=True)}
        return MicroBatchLoss(losses, metrics, gradients)

    def run_warm_up(self, hidden: torch.Tensor, targets: Targets, objective: Objective) -> None:
        """Compute a loss as in a step's first micro-batch, in the same memory, and leave no gradient in the store.

        Do nothing for a reward model: of its loss nothing is compiled.

        hidden: [B, T, D].
        targets: [B, T].
        """
        if self._model.structure.is_reward:
            return
        with self._bound() as named:
            of_tokens = replace(objective, logprob_objective=None)
            self._chunked(hidden, targets, named, LossShare(of_tokens, targets.ids.numel(), 1))
        self._gradients.begin()

    @contextmanager
    def _bound(self) -> Iterator[Named]:
        """Bind the weights of the head's modules for the block; yield their parameters."""
        with self._model.bound_loss() as bound, self._model.saving(*bound):
            yield [pair for path in bound for pair in zip(self._model.segments[path], bound[path], strict=True)]

    def _of_logprobs(
        self, hidden: torch.Tensor, targets: Targets, named: Named, share: LossShare
    ) -> tuple[LossResult, LogprobLoss]:
        """Compute a loss of documents in two passes over the chunks: log-probabilities, and gradients by their weights.

        A policy's loss has the metric `entropy`: the mean over the learned tokens of the step.
        """
        objective, counts = share.objective.logprob_objective, share.counts
        assert objective is not None and counts is not None
        chunk_tokens = self._plan.compute.score_chunk_tokens
        is_policy = isinstance(objective, PolicyObjective)
        of_chunk = logprobs_and_entropies if is_policy else target_logprobs
        scores = score_chunks(self._model.proxied.logits, hidden, targets, of_chunk, chunk_tokens=chunk_tokens)
        found = objective.loss(scores[:, 0].contiguous() if is_policy else scores, targets, counts)
        if is_policy:
            found.metrics["entropy"] = Mean(scores[:, 1].sum(), counts.tokens)
        weighted = targets._replace(weights=found.weights)
        of_tokens = replace(share, objective=replace(share.objective, logprob_objective=None), total_weight=1.0)
        return self._chunked(hidden, weighted, named, of_tokens), found

    def _of_scores(
        self, hidden: torch.Tensor, targets: Targets, named: Named, share: LossShare
    ) -> tuple[LossResult, LogprobLoss]:
        """Compute the loss of documents by the scores of all tokens, which take too little room for chunks."""
        objective, counts = share.objective.logprob_objective, share.counts
        assert objective is not None and counts is not None
        given = hidden.detach().requires_grad_(hidden.requires_grad)
        with torch.enable_grad():
            scores = self._model.proxied.logits(given).float().flatten()
        found = objective.loss(scores.detach(), targets, counts)
        of_hidden, *of_parameters = gradients_of(scores, [given, *(p for _, p in named)], -found.weights)
        return LossResult([], [], of_hidden, of_parameters), found

    def _chunked(self, hidden: torch.Tensor, targets: Targets, named: Named, share: LossShare) -> LossResult:
        sums: dict[str, OpenSum] = {}
        if self._plan.compute.chunks_add_to_sums:  # otherwise chunks are added into a sum of their own
            sums = self._gradients.open_sums(self._head, self._model.structure.loss_parameters)
        return chunked_loss(
            partial(self._model.chunk_sums, share.objective),
            hidden,
            targets,
            [parameter for _, parameter in named],
            chunk_tokens=self._plan.compute.loss_chunk_tokens,
            total_weight=share.total_weight,
            add=self._device.add,
            into=[sums.get(segment.name) for segment, _ in named],
        )
