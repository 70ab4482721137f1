"""One step on the compute thread: forwards, loss and backwards in the order of the visits.

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
    """The step's share of this rank. `num_supervised`: target tokens of the step over all ranks and micro-batches; in a
    captured step, whose number is another each time, an FP32 scalar on the device."""

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
    """`cross_entropy`: of the loss, where that has other terms. `bad_parameter`: the first in model order whose
    gradient is not finite."""

    loss: float
    cross_entropy: float | None
    grad_norm: float
    bad_parameter: str | None


class Submitted(NamedTuple):
    """What the host reads of a step: in `values`, 1-D FP32 on the device, plain cross-entropies of the loss's chunks,
    then what the loss is the sum of, then the norm; of all ranks."""

    values: torch.Tensor
    num_cross_entropies: int
    has_terms: bool  # the loss is more than cross-entropy


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
        """`activations`: where some of them do not wait on the device. `orthogonalizer`: where Muon trains something.
        `device_shard`: where layers live on the device; `gate`: where these are saved. `before_sums`: is told of every
        visit that completes a gradient, before the ranks add theirs up."""
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
        self._closed: set[str] = set()  # layers whose graphs were seen to end at their arguments and weights
        self.whereabouts = "between steps"  # read by other threads

    def run(self, step: StepInput, visits: tuple[Visit, ...], header: UpdateHeader | None) -> StepOutput:
        """All visits; returns when the loss and the norm are known on the host. `header`: of the update where it does
        not wait for the norm; layers on the device have it then as soon as their gradient is complete."""
        return self.read(self.submit(step, visits, header))

    def submit(self, step: StepInput, visits: tuple[Visit, ...], header: UpdateHeader | None) -> Submitted:
        """As `run`, but for the wait: nothing of what the step brings is on the host yet."""
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
        """In the order of micro-batches of the whole step."""
        return self._ranks.gather(torch.stack(values))

    def read(self, submitted: Submitted) -> StepOutput:
        """Waits until the device has come to it. `bad_parameter` is that of the norms that the store has now."""
        with self._device.exposed("loss"):
            *losses, norm = submitted.values.tolist()
        count = submitted.num_cross_entropies
        bad = None
        if not math.isfinite(norm):
            names = self._layout.parameter_order
            bad = next((n for n in names if not bool(torch.isfinite(self._store.norms[n]))), "the norm of all")
        return StepOutput(sum(losses[count:]), sum(losses[:count]) if submitted.has_terms else None, norm, bad)

    def orthogonalize(self, scale: float) -> None:
        """After the backward of a clipped step: submits the directions of what Muon trains. `scale`: of the update."""
        if self._orthogonalizer:
            self._orthogonalizer.run(scale)

    def update_residents(self, header: UpdateHeader) -> None:
        """After the backward of a clipped step: submits the update of the layers that live on the device."""
        for layer in self._device_shard.updated if self._device_shard else ():
            self._update_resident(layer, header)

    def departures(self) -> list[Departure]:
        """After the backward of a clipped step: of gradients that waited on the device, in the order of the shards'
        update."""
        return [self._store.depart(layer) for layer in self._plan.departing_layers]

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
        """Asks for the sum that the next visit will add to."""
        for visit in coming:
            if self._has_gradient(visit) and visit.micro_batches[0] > 0:
                self._transfer(self._store.fetch(visit.layer))

    def _has_gradient(self, visit: Visit) -> bool:
        return visit.phase in WITH_GRADIENT and self._layout.layers[visit.layer].trained.size > 0

    def _targets(self, step: StepInput) -> list[torch.Tensor]:
        """On the device before the first layer."""
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
        """Runs every call of the layer that the micro-batch's forward makes."""
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
        """Of a block's own forward behind a call of a part. `between`: gets what it saves for its backward, where that
        is to wait elsewhere. Behind the block's last call the model's own forward runs, too, which stays."""
        spec, store = self._structure.layers[layer], self._activations
        is_last = spec.part is None or (spec.part.is_last and call.path == spec.modules[-1])
        if is_last or store is None or self._plan.layers[layer].kept is Tier.HBM:
            return nullcontext()
        return noting_saved(between, store.check_there)

    def _replay(self, layer: int, j: int, state: _StepState) -> None:
        """What its calls returned is there again."""
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
        """Of a forward of the call; None where it keeps no graph. `kept`: gets what is saved for its backward, where
        that is to wait elsewhere."""
        plan = self._plan.layers[layer]
        if plan.activations is not ActivationPolicy.KEEP or not self._modules.keeps(call.path):
            return None
        return self._modules.saving(call.path, kept=None if plan.kept is Tier.HBM else kept)

    def _loss(self, j: int, state: _StepState) -> dict[str, torch.Tensor | None]:
        """Of one micro-batch; returns gradients of the head."""
        step = state.step
        share = LossShare(step.objective, step.world.num_supervised, len(state.passes) * step.world.size)
        found = self._step_loss.run(j, state.passes[j], state.targets[j], share)
        state.losses += found.losses
        state.cross_entropies += found.cross_entropies
        return found.gradients

    def _backward(self, layer: int, j: int, state: _StepState) -> dict[str, torch.Tensor | None]:
        """Backward of the layer's calls, last one first; gradients by parameter name."""
        forward_pass = state.passes[j]
        if self._activations:
            self._activations.bring_back(Stop(Phase.BACKWARD, layer, j))
        gradients: dict[str, torch.Tensor | None] = {}
        while forward_pass.calls and self._layer_of(call := forward_pass.calls[-1]) == layer:
            forward_pass.settle(call)
            if not call.has_graph:
                self._recompute(call, layer, j, state)
            if call.path not in self._closed:  # once is enough: it is a property of the layer
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
        """Puts aside what belongs to parameters of earlier layers, and adds what later layers put aside for this one's.

        Autograd's order within a micro-batch: the latest use contributes first.
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
        """`call`: 0 inside the layer, 1 in what the model does after it."""
        first = step.world.rank * len(step.micro_batches)
        self._device.seed(dropout_seed(step.dropout_seed, step.step, first + micro_batch, layer, call))


class _StepState:
    """What a step remembers between visits."""

    def __init__(
        self, step: StepInput, passes: list[ForwardPass], targets: list[torch.Tensor], header: UpdateHeader | None
    ) -> None:
        self.step = step
        self.header = header
        self.passes = passes
        self.targets = targets
        self.losses: list[torch.Tensor] = []  # one a chunk, then that of side outputs, for each micro-batch
        self.cross_entropies: list[torch.Tensor] = []  # one a chunk
        self.tied: list[dict[str, torch.Tensor | None]] = [{} for _ in passes]


def _add(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
