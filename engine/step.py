"""One step on the compute thread: forwards, loss and backwards in the order of the visits.

The order of a step is data (visits.py). This file says what happens in a visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from megatrain_ray.engine.device import Device
from megatrain_ray.engine.dropout_seed import dropout_seed
from megatrain_ray.engine.forward_pass import ForwardPass
from megatrain_ray.engine.gradients import GradientStore
from megatrain_ray.engine.layer_call import Function, LayerCall
from megatrain_ray.engine.layout import ModelLayout, Segment
from megatrain_ray.engine.loss import chunked_loss
from megatrain_ray.engine.micro_batch import MicroBatch
from megatrain_ray.engine.model import ModelStructure
from megatrain_ray.engine.offload import Departure, Fetch
from megatrain_ray.engine.plan import ActivationPolicy, Plan
from megatrain_ray.engine.residents import Residents
from megatrain_ray.engine.skeleton import Skeleton
from megatrain_ray.engine.streamer import LayerStreamer
from megatrain_ray.engine.template import Template, Templates, positions_of
from megatrain_ray.engine.visits import Phase, Visit
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Op


@dataclass(frozen=True)
class World:
    """The step's share of this rank. `num_supervised`: target tokens of the step over all ranks and micro-batches."""

    num_supervised: int
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class StepInput:
    step: int  # from 1
    micro_batches: tuple[MicroBatch, ...]
    world: World
    dropout_seed: int


@dataclass(frozen=True)
class StepOutput:
    """`bad_parameter`: the first in model order whose gradient is not finite."""

    loss: float
    grad_norm: float
    bad_parameter: str | None


class StepRunner:
    """Runs steps of one plan. Compute thread only."""

    def __init__(
        self,
        plan: Plan,
        structure: ModelStructure,
        layout: ModelLayout,
        device: Device,
        skeleton: Skeleton,
        streamer: LayerStreamer,
        residents: Residents,
        store: GradientStore,
        transfer: Callable[[Departure | Fetch], None],
    ) -> None:
        self._plan = plan
        self._structure = structure
        self._layout = layout
        self._device = device
        self._skeleton = skeleton
        self._streamer = streamer
        self._residents = residents
        self._store = store
        self._transfer = transfer
        self._segments = _segments_by_module(structure, layout)
        templates = Templates()
        self._templates = {
            path: templates.get(module, [segment.local for segment in self._segments[path]])
            for path, module in skeleton.modules.items()
        }
        self._positions = {path: positions_of(module) for path, module in skeleton.modules.items()}
        self._closed: set[str] = set()  # layers whose graphs were seen to end at their arguments and weights
        self.num_forwards = 0
        self.whereabouts = "between steps"  # read by other threads

    def run(self, step: StepInput, visits: tuple[Visit, ...]) -> StepOutput:
        """All visits; returns when the loss and the norm are known on the host."""
        self._store.begin()
        packed = any(micro_batch.positions is not None for micro_batch in step.micro_batches)
        self._skeleton.attention.set(self._plan.packed_attention if packed else self._plan.attention)
        state = _StepState(step, [self._forward_pass(mb) for mb in step.micro_batches], self._targets(step))
        for visit in visits:
            if self._store.waits_on_host:
                self._fetch_ahead(visits[visit.index + 1 : visit.index + 2])
            self.whereabouts = f"step {step.step}, {visit.phase.value} of {self._plan.layers[visit.layer].name}"
            with self._streamer.layer(visit.index) as regions, self._residents.bound(regions):
                for j in visit.micro_batches:
                    self._visit(visit, j, state)
                if visit.last:
                    self._transfer(self._store.finish(visit.layer))
                elif self._store.waits_on_host and visit.phase is not Phase.FORWARD:
                    self._transfer(self._store.suspend(visit.layer))
        output = self._output(state)
        self.whereabouts = f"after the backward of step {step.step}"
        return output

    def _fetch_ahead(self, coming: tuple[Visit, ...]) -> None:
        """Asks for the sum that the next visit will add to."""
        for visit in coming:
            if visit.phase is not Phase.FORWARD and visit.micro_batches[0] > 0:
                self._transfer(self._store.fetch(visit.layer))

    def _forward_pass(self, micro_batch: MicroBatch) -> ForwardPass:
        device, positions = self._device.torch_device, micro_batch.positions
        input_ids = micro_batch.input_ids.to(device)
        if positions is not None:
            positions = positions.to(device)
        return ForwardPass(lambda: self._skeleton.forward(input_ids, positions))

    def _targets(self, step: StepInput) -> list[torch.Tensor]:
        """On the device before the first layer: a copy from pageable memory later would wait for the compute stage."""
        return [micro_batch.targets.to(self._device.torch_device) for micro_batch in step.micro_batches]

    def _visit(self, visit: Visit, j: int, state: _StepState) -> None:
        forward_pass = state.passes[j]
        if visit.phase is Phase.BACKWARD:
            gradients = self._backward(visit.layer, j, state)
            self._keep_tied(visit.layer, gradients, state.tied[j])
            self._store.add(visit.layer, gradients, first=j == 0)
            if not forward_pass.calls:
                forward_pass.free()
            return
        if visit.phase is Phase.FORWARD and visit.layer == 0:
            self._seed(state.step, j, 0, 1)
            forward_pass.start()
        self._forward(visit.layer, j, state)
        if visit.phase is Phase.HEAD:
            gradients = self._loss(j, state)
            gradients |= self._backward(visit.layer, j, state)
            self._keep_tied(visit.layer, gradients, state.tied[j])
            self._store.add(visit.layer, gradients, first=j == 0)

    def _forward(self, layer: int, j: int, state: _StepState) -> None:
        """Runs every call of the layer that the micro-batch's forward makes."""
        forward_pass = state.passes[j]
        keep = self._plan.layers[layer].activations is ActivationPolicy.KEEP
        while (call := forward_pass.pending) is not None and self._layer_of(call) == layer:
            with self._bound(call.path) as (function, parameters), self._device.compute(Op("forward", layer, j)):
                self._seed(state.step, j, layer, 0)
                saving = self._residents.saving() if keep else None
                outcome = call.forward(function, parameters, saving)
                self.num_forwards += 1
            self._seed(state.step, j, layer, 1)
            forward_pass.resume(outcome)

    def _loss(self, j: int, state: _StepState) -> dict[str, torch.Tensor | None]:
        """Loss of one micro-batch; sends its gradient into the forward pass and returns that of the head."""
        forward_pass = state.passes[j]
        hidden = self._final_hidden(forward_pass)
        with ExitStack() as stack:
            named: list[tuple[Segment, torch.Tensor]] = []
            for path in sorted(self._structure.loss_modules):
                _, parameters = stack.enter_context(self._bound(path))
                named += zip(self._segments[path], parameters, strict=True)
            stack.enter_context(self._residents.saving())
            stack.enter_context(self._device.compute(Op("loss", len(self._layout.layers) - 1, j)))
            result = chunked_loss(
                self._skeleton.logits,
                hidden,
                state.targets[j],
                [parameter for _, parameter in named],
                chunk_tokens=self._plan.loss_chunk_tokens,
                num_supervised=state.step.world.num_supervised,
            )
            auxiliary = self._skeleton.auxiliary(forward_pass.result)
        forward_pass.send(hidden, result.hidden)
        state.losses += result.losses
        if auxiliary is not None:
            self._add_auxiliary(auxiliary, forward_pass, state)
        forward_pass.result = None
        return {s.tied_to or s.name: g for (s, _), g in zip(named, result.parameters, strict=True)}

    def _add_auxiliary(self, auxiliary: torch.Tensor, forward_pass: ForwardPass, state: _StepState) -> None:
        """A mean over the micro-batches of the step: the term is no sum over tokens."""
        count = len(state.passes) * state.step.world.size
        forward_pass.send(auxiliary, torch.full_like(auxiliary, 1 / count))
        state.losses.append(auxiliary.detach() / count)

    def _final_hidden(self, forward_pass: ForwardPass) -> torch.Tensor:
        if forward_pass.pending is not None:
            raise MegatrainError(f"the forward called {forward_pass.pending.path} after its last layer")
        hidden: torch.Tensor = forward_pass.result.last_hidden_state
        return hidden

    def _backward(self, layer: int, j: int, state: _StepState) -> dict[str, torch.Tensor | None]:
        """Backward of the layer's calls, last one first; gradients by parameter name."""
        forward_pass = state.passes[j]
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
            for segment, gradient in zip(self._segments[call.path], of_parameters, strict=True):
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
        with self._bound(call.path) as (function, parameters), self._device.compute(Op("recompute", layer, j)):
            self._seed(state.step, j, layer, 0)
            call.recompute(function, parameters, self._residents.saving())
            self.num_forwards += 1

    @contextmanager
    def _bound(self, path: str) -> Iterator[tuple[Function, list[torch.Tensor]]]:
        layer = self._structure.layer_of(path)
        template: Template = self._templates[path]
        parameters = [self._residents.parameter(layer, segment) for segment in self._segments[path]]
        with template.bound(parameters, self._positions[path]) as module:
            yield partial(self._skeleton.recorder.run, module), parameters

    def _layer_of(self, call: LayerCall) -> int:
        return self._structure.layer_of(call.path)

    def _seed(self, step: StepInput, micro_batch: int, layer: int, call: int) -> None:
        """`call`: 0 inside the layer, 1 in what the model does after it."""
        first = step.world.rank * len(step.micro_batches)
        self._device.seed(dropout_seed(step.dropout_seed, step.step, first + micro_batch, layer, call))

    def _output(self, state: _StepState) -> StepOutput:
        norm = self._store.total_norm()
        with self._device.exposed("loss"):
            *losses, norm_value = torch.stack([*state.losses, norm]).tolist()
        bad = None
        if not math.isfinite(norm_value):
            names = self._layout.parameter_order
            bad = next((n for n in names if not bool(torch.isfinite(self._store.norms[n]))), "the norm of all")
        return StepOutput(sum(losses), norm_value, bad)


class _StepState:
    """What a step remembers between visits."""

    def __init__(self, step: StepInput, passes: list[ForwardPass], targets: list[torch.Tensor]) -> None:
        self.step = step
        self.passes = passes
        self.targets = targets
        self.losses: list[torch.Tensor] = []
        self.tied: list[dict[str, torch.Tensor | None]] = [{} for _ in passes]


def _add(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _segments_by_module(structure: ModelStructure, layout: ModelLayout) -> dict[str, list[Segment]]:
    """Module path → its parameters."""
    found: dict[str, list[Segment]] = {}
    for spec, flat in zip(structure.layers, layout.layers, strict=True):
        for path in spec.modules:
            found[path] = [s for s in flat.segments if s.name == f"{path}.{s.local}"]
    return found
