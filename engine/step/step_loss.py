"""The head's visit: a micro-batch's loss, with its gradients at once. Compute thread only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.gradients.interfaces import GradientTaker
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.skeleton import Skeleton
from megatrain_ray.engine.layout.flat_layout import Segment
from megatrain_ray.engine.model.chunked_loss import ChunkSums, LossResult, Objective, OpenSum, chunked_loss
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.weights_stream.bound_modules import BoundModules
from megatrain_ray.virtual_clock import Op


@dataclass(frozen=True)
class LossShare:
    """What a micro-batch's loss is a share of. `num_supervised`: target tokens, as in World; `num_parts`:
    micro-batches, both of the step over all ranks."""

    objective: Objective
    num_supervised: int | torch.Tensor
    num_parts: int


@dataclass(frozen=True)
class MicroBatchLoss:
    """Shares of the step's loss, one a chunk and then that of side outputs; plain cross-entropy of each chunk;
    gradients by parameter, but of those whose sum over the step has them already."""

    losses: list[torch.Tensor]
    cross_entropies: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]


class StepLoss:
    """Norm, head and loss are the model's own; what is here calls them in chunks."""

    def __init__(
        self,
        plan: Plan,
        structure: ModelStructure,
        device: Device,
        skeleton: Skeleton,
        modules: BoundModules,
        chunk_sums: ChunkSums,
        store: GradientTaker,
    ) -> None:
        self._plan = plan
        self._structure = structure
        self._device = device
        self._skeleton = skeleton
        self._modules = modules
        self._chunk_sums = chunk_sums
        self._store = store
        self._head = len(plan.layers) - 1

    @property
    def compiled(self) -> CompiledCall | None:
        """What of it is to be compiled before the first step."""
        return self._chunk_sums if isinstance(self._chunk_sums, CompiledCall) else None

    def run(self, j: int, forward_pass: ForwardPass, targets: torch.Tensor, share: LossShare) -> MicroBatchLoss:
        """Of micro-batch `j`, whose forward is over but for the head's own modules; sends its gradient into the
        forward pass. targets: [B, T]."""
        hidden = forward_pass.final_hidden
        with self._bound() as named:
            with self._device.compute(Op("loss", self._head, j)):
                result = self._chunked(hidden, targets, named, share, first=j == 0)
            auxiliary = self._skeleton.auxiliary(forward_pass.result)
        forward_pass.send(hidden, result.hidden)
        losses = [*result.losses]
        if auxiliary is not None:  # a mean over the micro-batches of the step: the term is no sum over tokens
            forward_pass.send(auxiliary, torch.full_like(auxiliary, 1 / share.num_parts))
            losses.append(auxiliary.detach() / share.num_parts)
        forward_pass.result = None
        gradients = {s.tied_to or s.name: g for (s, _), g in zip(named, result.parameters, strict=True)}
        return MicroBatchLoss(losses, result.cross_entropies, gradients)

    def rehearse(self, hidden: torch.Tensor, targets: torch.Tensor, objective: Objective) -> None:
        """The loss of a step's first micro-batch, in the memory that it takes in a step. Between steps; leaves nothing
        in the store. hidden: [B, T, D], targets: [B, T]."""
        with self._bound() as named:
            self._chunked(hidden, targets, named, LossShare(objective, targets.numel(), 1), first=True)
        self._store.begin()

    @contextmanager
    def _bound(self) -> Iterator[list[tuple[Segment, torch.Tensor]]]:
        """Within it the head's modules can be called; yields their parameters."""
        with ExitStack() as stack:
            named: list[tuple[Segment, torch.Tensor]] = []
            for path in sorted(self._structure.loss_modules):
                _, parameters = stack.enter_context(self._modules.bound(path))
                named += zip(self._modules.segments[path], parameters, strict=True)
            stack.enter_context(self._modules.saving(*self._structure.loss_modules))
            yield named

    def _chunked(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        named: Sequence[tuple[Segment, torch.Tensor]],
        share: LossShare,
        *,
        first: bool,
    ) -> LossResult:
        sums = self._open_sums(first=first)
        return chunked_loss(
            partial(self._chunk_sums, share.objective),
            hidden,
            targets,
            [parameter for _, parameter in named],
            chunk_tokens=self._plan.loss_chunk_tokens,
            num_supervised=share.num_supervised,
            add=self._device.add,
            into=[sums.get(segment.name) for segment, _ in named],
        )

    def _open_sums(self, *, first: bool) -> dict[str, OpenSum]:
        """Of the head's parameters to whose sums over micro-batches each chunk's gradient is added."""
        if not self._plan.chunks_add_to_sums:
            return {}
        return self._store.open_sums(self._head, self._structure.loss_parameters, first=first)
