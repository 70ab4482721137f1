"""Runs one step on the compute thread: forwards, loss and backwards in the order of the visits.

The order of a step is data (plan/schedule.py). This file says what happens in a visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatrain_ray.engine.activations.activation_store import ActivationStore
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import Ranks
from megatrain_ray.engine.gradients.gradient_offloader import Departure, Transfer
from megatrain_ray.engine.gradients.interfaces import GradientTaker, LayerSource
from megatrain_ray.engine.gradients.muon_directions import Orthogonalizer
from megatrain_ray.engine.host.interfaces import UpdateHeader
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.layer_call import LayerCall
from megatrain_ray.engine.layer_calls.part_memory import leaving, let_go, noting_saved, own_of_glue
from megatrain_ray.engine.layer_calls.skeleton import Skeleton
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.model.dropout_seed import dropout_seed
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.activation_moves import Stop
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import WITH_GRADIENT, Phase, Visit
from megatrain_ray.engine.shards.device_shard import DeviceShard, UpdateGate
from megatrain_ray.engine.step.step_loss import LossShare, StepLoss
from megatrain_ray.engine.weights_stream.bound_modules import BoundModules
from megatrain_ray.engine.weights_stream.bound_weights import Residents
from megatrain_ray.virtual_clock import Op


@dataclass(frozen=True)
class World:
    """Describes this rank's share of a step.

    num_supervised: target tokens of the step over all ranks and micro-batches. In a captured step this number changes
        from step to step, so it is an FP32 scalar on the device.
    """

    num_supervised: int | torch.Tensor
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class StepInput:
    step: int  # from 1
    micro_batches: tuple[MicroBatch, ...]
    world: World
    dropout_seed: int
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class StepOutput:
    """Holds the loss and the gradient norm of a step.

    cross_entropy: the plain cross-entropy in the loss, if the loss has other terms; else None.
    bad_parameter: the first parameter in model order whose gradient is not finite; None if all are finite.
    """

    loss: float
    cross_entropy: float | None
    grad_norm: float
    bad_parameter: str | None


class Submitted(NamedTuple):
    """Holds the device tensor of a submitted step that the host has yet to read.

    values: 1-D FP32 on the device, for all ranks: plain cross-entropies of the loss's chunks, then the terms whose sum
        is the loss, then the gradient norm.
    num_cross_entropies: how many of the values are plain cross-entropies.
    """

    values: torch.Tensor
    num_cross_entropies: int
    has_terms: bool  # whether the loss has terms besides cross-entropy


class StepRunner:
    """Runs steps of one plan. Compute thread only."""

    def __init__(
        self,
        plan: Plan,
        structure: ModelStructure,
        layout: ModelLayout,
        device: Device,
        skeleton: Skeleton,
        streamer: LayerSource,
        residents: Residents,
        modules: BoundModules,
        step_loss: StepLoss,
        store: GradientTaker,
        activations: ActivationStore | None,
        orthogonalizer: Orthogonalizer | None,
        transfer: Callable[[Transfer], None],
        device_shard: DeviceShard | None,
        gate: UpdateGate | None,
        ranks: Ranks,
        before_sums: Callable[[int], None] | None = None,
    ) -> None:
        """Keep the components of a step.

        activations: given if some activations are offloaded, or dropped and computed again.
        orthogonalizer: given if Muon trains something.
        device_shard: given if layers live on the device.
        gate: given if those layers are saved.
        before_sums: called with every visit that completes a gradient, before the ranks sum their gradients.
        """
        self._before_sums = before_sums or (lambda visit: None)
        self._ranks = ranks
        self._plan = plan
        self._structure = structure
        self._layout = layout
        self._device = device
        self._skeleton = skeleton
        self._streamer = streamer
        self._residents = residents
        self._store = store
        self._activations = activations
        self._orthogonalizer = orthogonalizer
        self._transfer = transfer
        self._modules = modules
        self._device_shard = device_shard
        self._gate = gate
        self._step_loss = step_loss
        self._closed: set[str] = set()  # paths of modules whose graphs were seen to end at their arguments and weights
        self.whereabouts = "between steps"  # read by other threads

    def run(self, step: StepInput, visits: tuple[Visit, ...], header: UpdateHeader | None) -> StepOutput:
        """Run all visits; return when the loss and the norm are known on the host.

        header: of an update that does not wait for the norm; else None. With a header, layers on the device are updated
            as soon as their gradient is complete.
        """
        return self.read(self.submit(step, visits, header))

    def submit(self, step: StepInput, visits: tuple[Visit, ...], header: UpdateHeader | None) -> Submitted:
        """Submit all visits of a step, as `run` does, but do not wait for the results.

        None of the results is on the host yet on return. `read` waits for them.
        """
        self._store.begin()
        if self._activations:
            self._activations.begin(visits)
        if self._orthogonalizer:
            self._orthogonalizer.begin()
        state = _StepState(
            step,
            [ForwardPass(self._skeleton.forward_of(mb, self._device.upload)) for mb in step.micro_batches],
            self._targets(step),
            header,
        )
        for visit in visits:
            if self._store.waits_on_host:
                self._fetch_ahead(visits[visit.index + 1 : visit.index + 2])
            self.whereabouts = f"step {step.step}, {visit.phase.value} of {self._plan.layers[visit.layer].name}"
            with self._streamer.layer(visit.index) as regions, self._residents.bound(regions):
                if visit.last and self._orthogonalizer:
                    self._orthogonalizer.expect(visit.layer)
                for j in visit.micro_batches:
                    self._visit(visit, j, state)
                if not self._has_gradient(visit):
                    continue
                if visit.last:
                    self._before_sums(visit.index)
                    self._finish(visit.layer, state.header)
                elif self._store.waits_on_host:
                    self._transfer(self._store.suspend(visit.layer))
        has_terms = len(state.losses) > len(state.cross_entropies) or not step.objective.is_cross_entropy
        self.whereabouts = f"after the backward of step {step.step}"
        plain, losses = self._of_all(state.cross_entropies), self._of_all(state.losses)
        return Submitted(torch.cat([plain, losses, self._store.total_norm()[None]]), len(plain), has_terms)

    def _of_all(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Gather `values` from all ranks, in the order of the whole step's micro-batches."""
        return self._ranks.gather(torch.stack(values))

    def read(self, submitted: Submitted) -> StepOutput:
        """Wait until the device has computed the results, and return them.

        `bad_parameter` is found in the norms that the gradient store holds now.
        """
        with self._device.exposed("loss"):
            *losses, norm = submitted.values.tolist()
        count = submitted.num_cross_entropies
        bad = None
        if not math.isfinite(norm):
            names = self._layout.parameter_order
            bad = next((n for n in names if not bool(torch.isfinite(self._store.norms[n]))), "the norm of all")
        return StepOutput(sum(losses[count:]), sum(losses[:count]) if submitted.has_terms else None, norm, bad)

    def orthogonalize(self, scale: float) -> None:
        """Submit Muon's directions, after the backward of a clipped step.

        scale: clip scale of the update.
        """
        if self._orthogonalizer:
            self._orthogonalizer.run(scale)

    def update_residents(self, header: UpdateHeader) -> None:
        """Submit the update of layers that live on the device, after the backward of a clipped step."""
        for layer in self._device_shard.updated if self._device_shard else ():
            self._update_resident(layer, header)

    def departures(self) -> list[Departure]:
        """Return requests to offload the complete gradients that waited on the device.

        Call after the backward of a clipped step. They are in the order in which the shards update layers.
        """
        return [self._store.depart(layer) for layer in self._plan.deferred_offload_layers]

    def _update_resident(self, layer: int, header: UpdateHeader) -> None:
        assert self._device_shard is not None  # the layer lives on the device
        if self._gate:
            self._gate.enter(layer, header.update)
        self._device_shard.update(layer, self._store.take(layer), header)

    def _finish(self, layer: int, header: UpdateHeader | None) -> None:
        with self._device.timed(Op("norms", layer)):
            departure = self._store.finish(layer)
        if departure is None:
            if header is not None:
                self._update_resident(layer, header)
        elif self._orthogonalizer:
            self._orthogonalizer.complete(departure)
        else:
            self._transfer(departure)

    def _fetch_ahead(self, coming: tuple[Visit, ...]) -> None:
        """Request the partial sum that the next visit will add to, if that sum is on the host."""
        for visit in coming:
            if self._has_gradient(visit) and visit.micro_batches[0] > 0:
                self._transfer(self._store.fetch(visit.layer))

    def _has_gradient(self, visit: Visit) -> bool:
        return visit.phase in WITH_GRADIENT and self._layout.layers[visit.layer].trained.size > 0

    def _targets(self, step: StepInput) -> list[torch.Tensor]:
        """Upload the targets of all micro-batches, before the first layer runs."""
        return [self._device.upload(micro_batch.targets) for micro_batch in step.micro_batches]

    def _visit(self, visit: Visit, j: int, state: _StepState) -> None:
        forward_pass = state.passes[j]
        if visit.phase is Phase.FORWARD and visit.layer == 0:
            self._seed(state.step, j, 0, 1)
            forward_pass.start()
        if visit.phase is Phase.REPLAY:
            self._replay(visit.layer, j, state)
        elif visit.phase is not Phase.BACKWARD:
            self._forward(visit.layer, j, state)
        if visit.phase not in WITH_GRADIENT:
            return
        gradients = self._loss(j, state) if visit.phase is Phase.HEAD else {}
        gradients |= self._backward(visit.layer, j, state)
        self._keep_tied(visit.layer, gradients, state.tied[j])
        if self._has_gradient(visit):
            with self._device.timed(Op("accumulate", visit.layer, j)):
                self._store.add(visit.layer, gradients, first=j == 0, last=j == len(state.passes) - 1)
        if not forward_pass.calls:
            forward_pass.free()

    def _forward(self, layer: int, j: int, state: _StepState) -> None:
        """Run every call of the layer that the micro-batch's forward makes."""
        forward_pass = state.passes[j]
        part = self._structure.layers[layer].part
        entered: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        between: list[torch.Tensor] = []
        while (call := forward_pass.pending) is not None and self._layer_of(call) == layer:
            with (
                self._modules.bound(call.path) as (function, parameters),
                self._device.compute(Op("forward", layer, j)),
            ):
                self._seed(state.step, j, layer, 0)
                outcome = call.forward(function, parameters, self._saving(call, layer, kept))
            self._seed(state.step, j, layer, 1)
            with self._device.timed(Op("between layers", layer, j)), self._noting(call, layer, between):
                forward_pass.resume(outcome)
            entered += [port.tensor for port in call.ports]
        if self._activations:
            if part:
                entered = leaving(forward_pass, part)
            glue = own_of_glue(between, forward_pass, part) if part else []
            self._activations.leave(layer, j, entered, kept, glue)
        if part:
            let_go(forward_pass, part)

    def _noting(self, call: LayerCall, layer: int, between: list[torch.Tensor]) -> AbstractContextManager[None]:
        """Collect what a block's own forward saves after a call of one of its parts.

        Returns a context that does nothing if those tensors stay on the device. After the block's last call the model's
        own forward runs too, and what it saves stays on the device.

        between: list that receives the saved tensors.
        """
        spec, store = self._structure.layers[layer], self._activations
        is_last = spec.part is None or (spec.part.is_last and call.path == spec.modules[-1])
        if is_last or store is None or self._plan.layers[layer].kept is Tier.HBM:
            return nullcontext()
        return noting_saved(between, store.check_there)

    def _replay(self, layer: int, j: int, state: _StepState) -> None:
        """Run the layer's calls again, and refill the outputs whose memory was released."""
        if self._activations:
            self._activations.bring_back(Stop(Phase.REPLAY, layer, j))
        for call in [call for call in state.passes[j].calls if self._layer_of(call) == layer]:
            with (
                self._modules.bound(call.path) as (function, parameters),
                self._device.compute(Op("replay", layer, j)),
            ):
                self._seed(state.step, j, layer, 0)
                call.replay(function, parameters, self._saving(call, layer))

    def _saving(
        self, call: LayerCall, layer: int, kept: list[torch.Tensor] | None = None
    ) -> AbstractContextManager[None] | None:
        """Return the context for a forward of the call; None if that forward keeps no graph.

        kept: list that receives the tensors saved for the backward, if they are to leave the device.
        """
        plan = self._plan.layers[layer]
        if plan.activations is not ActivationPolicy.KEEP or not self._modules.keeps(call.path):
            return None
        return self._modules.saving(call.path, kept=None if plan.kept is Tier.HBM else kept)

    def _loss(self, j: int, state: _StepState) -> dict[str, torch.Tensor | None]:
        """Compute the loss of one micro-batch; return the gradients of the head."""
        step = state.step
        share = LossShare(step.objective, step.world.num_supervised, len(state.passes) * step.world.size)
        found = self._step_loss.run(j, state.passes[j], state.targets[j], share)
        state.losses += found.losses
        state.cross_entropies += found.cross_entropies
        return found.gradients

    def _backward(self, layer: int, j: int, state: _StepState) -> dict[str, torch.Tensor | None]:
        """Run the backward of the layer's calls, last call first; return gradients by parameter name."""
        forward_pass = state.passes[j]
        if self._activations:
            self._activations.bring_back(Stop(Phase.BACKWARD, layer, j))
        gradients: dict[str, torch.Tensor | None] = {}
        while forward_pass.calls and self._layer_of(call := forward_pass.calls[-1]) == layer:
            forward_pass.settle(call)
            if not call.has_graph:
                self._recompute(call, layer, j, state)
            if call.path not in self._closed:  # once is enough: this does not change from step to step
                call.check_closed()
                self._closed.add(call.path)
            with self._device.compute(Op("backward", layer, j)):
                of_parameters = forward_pass.backward(call)
            for segment, gradient in zip(self._modules.segments[call.path], of_parameters, strict=True):
                name = segment.tied_to or segment.name
                gradients[name] = _add(gradients.get(name), gradient)
        return gradients

    def _keep_tied(
        self, layer: int, gradients: dict[str, torch.Tensor | None], tied: dict[str, torch.Tensor | None]
    ) -> None:
        """Set aside gradients of tied parameters until the layer that owns the parameter is visited.

        Adds what later layers set aside for this layer to `gradients`. The order is autograd's within a micro-batch:
        the latest use contributes first.
        """
        for name, gradient in gradients.items():
            gradients[name] = _add(tied.pop(name, None), gradient)
        own = {segment.name for segment in self._layout.layers[layer].owned}
        tied |= {name: gradients[name] for name in gradients if name not in own}
        gradients |= {name: tied.pop(name) for name in own & tied.keys()}

    def _recompute(self, call: LayerCall, layer: int, j: int, state: _StepState) -> None:
        with self._modules.bound(call.path) as (function, parameters), self._device.compute(Op("recompute", layer, j)):
            self._seed(state.step, j, layer, 0)
            call.recompute(function, parameters, self._modules.saving(call.path))

    def _layer_of(self, call: LayerCall) -> int:
        return self._structure.layer_of(call.path)

    def _seed(self, step: StepInput, micro_batch: int, layer: int, call: int) -> None:
        """Seed the device's random numbers for one call of one micro-batch.

        call: 0 inside the layer, 1 in what the model computes after it.
        """
        first = step.world.rank * len(step.micro_batches)
        self._device.seed(dropout_seed(step.dropout_seed, step.step, first + micro_batch, layer, call))


class _StepState:
    """Holds what a step remembers between visits."""

    def __init__(
        self, step: StepInput, passes: list[ForwardPass], targets: list[torch.Tensor], header: UpdateHeader | None
    ) -> None:
        self.step = step
        self.header = header
        self.passes = passes
        self.targets = targets
        self.losses: list[torch.Tensor] = []  # for each micro-batch: one a chunk, then that of side outputs
        self.cross_entropies: list[torch.Tensor] = []  # one a chunk
        self.tied: list[dict[str, torch.Tensor | None]] = [{} for _ in passes]


def _add(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
