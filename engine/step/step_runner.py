"""Runs one step on the compute thread: forwards, loss and backwards in the order of the visits (plan/schedule.py).

This file says what happens in a visit. Hooks move data between device, host and disk (step_hooks.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import Ranks
from megatrain_ray.engine.gradients.interfaces import GradientAccumulator, LayerForward, LayerSource, StepHooks
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.layer_call import Function, LayerCall, unsaved
from megatrain_ray.engine.layer_calls.part_memory import collecting_saved, release_spent
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import Targets
from megatrain_ray.engine.model.micro_batch import dropout_seed
from megatrain_ray.engine.objectives.logprob_objective import joining, with_margin
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.activation_moves import Stop
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import WITH_GRADIENT, Phase, Visit
from megatrain_ray.engine.step.step_data import StepInput, StepOutput, Submitted
from megatrain_ray.engine.step.step_loss import LossShare, StepLoss
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.errors import MegatrainError
from megatrain_ray.virtual_clock import Op

Gradients = dict[str, torch.Tensor | None]  # by parameter; None: no gradient flowed


@dataclass(frozen=True)
class _StepState:
    """Holds what a step remembers between visits. The first three lists are by micro-batch.

    metrics: by name, parts of all micro-batches.
    """

    step: StepInput
    passes: list[ForwardPass]
    targets: list[Targets]
    tied: list[Gradients]  # set aside for the layer that owns the parameter
    losses: list[torch.Tensor] = field(default_factory=list)  # of each micro-batch: one a chunk, one of side outputs
    metrics: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class StepRunner:
    """Runs steps of one plan. Compute thread only."""

    def __init__(
        self, plan: Plan, device: Device, model: BoundModel, source: LayerSource, step_loss: StepLoss,
        gradients: GradientAccumulator, ranks: Ranks, hooks: Sequence[StepHooks] = (),
    ) -> None:  # fmt: skip
        self._plan = plan
        self._device = device
        self._model = model
        self._source = source  # provides the weights of each visit
        self._step_loss = step_loss
        self._gradients = gradients
        self._ranks = ranks
        self._settle = device.settle if plan.settles else None
        self._hooks = hooks  # called at each point of a step in this order
        self._layout = model.layout
        self._closed: set[str] = set()  # paths of modules whose graphs were seen to end at their arguments and weights
        self.current_phase = "between steps"  # read by other threads

    def submit(self, step: StepInput, params: UpdateParams | None = None) -> Submitted:
        """Submit all visits of a step. None of the results is on the host yet on return: `read` waits for them.

        params: of an update that does not wait for the norm; else None. With `params`, layers on the device are updated
            as soon as their gradient is complete.
        """
        self._gradients.begin()
        visits = self._plan.visits(self._model.structure.without_backward, len(step.micro_batches))
        for hook in self._hooks:
            hook.begin_step(visits)
        passes = self._model.forward_passes(step.micro_batches)
        targets = [micro_batch.uploaded_targets(self._device.upload) for micro_batch in step.micro_batches]
        state = _StepState(step, passes, targets, [{} for _ in passes])
        for visit in visits:
            self.current_phase = f"step {step.step}, {visit.phase.value} of {self._plan.layers[visit.layer].name}"
            with self._source.layer(visit.index) as regions, self._model.weights.bound(regions):
                for hook in self._hooks:
                    hook.before_visit(visit)
                for j in visit.micro_batches:
                    self._visit(visit, j, state)
                if visit.last and self._has_gradient(visit):
                    self._finalize(visit, params)
            for hook in self._hooks:
                hook.after_visit(visit)
        self.current_phase = f"after the backward of step {step.step}"
        metrics = state.metrics
        if step.objective.is_cross_entropy and len(state.losses) == len(metrics["cross_entropy"]):
            metrics = {}  # it is the loss
        # Of all ranks, in the order of the whole step's micro-batches.
        *parts, losses = (self._ranks.gather(torch.stack(values)) for values in (*metrics.values(), state.losses))
        counts = {name: len(part) for name, part in zip(metrics, parts, strict=True)}
        return Submitted(torch.cat([*parts, losses, self._gradients.total_norm()[None]]), counts)

    def read(self, submitted: Submitted) -> StepOutput:
        """Wait until the device has computed the results. The gradient store must still hold the step's norms."""
        with self._device.exposed("loss"):
            *values, norm = submitted.values.tolist()
        metrics: dict[str, float] = {}
        bad = None
        for name, count in submitted.counts.items():
            metrics[name], values = joining(name)(values[:count]), values[count:]
        if not math.isfinite(norm):
            names, norms = self._layout.parameter_order, self._gradients.norms
            bad = next((name for name in names if not bool(torch.isfinite(norms[name]))), "the norm of all")
        return StepOutput(sum(values), with_margin(metrics), norm, bad)

    def apply_scale(self, params: UpdateParams) -> None:
        """Submit what needs the scale of a clipped update, after the backward."""
        for hook in self._hooks:
            hook.scale_known(params)

    def end(self, update: int) -> None:
        """Say that all work of the step is submitted."""
        for hook in self._hooks:
            hook.end_step(update)

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
                self._gradients.add(visit.layer, gradients, last=j == len(state.passes) - 1)
        if not forward_pass.calls:
            forward_pass.free()

    def _finalize(self, visit: Visit, params: UpdateParams | None) -> None:
        self._source.sync_collective_order(visit.index)
        with self._device.timed(Op("norms", visit.layer)):
            offload = self._gradients.finalize(visit.layer)
        for hook in self._hooks:
            hook.gradient_ready(visit.layer, offload, params)

    def _has_gradient(self, visit: Visit) -> bool:
        return visit.phase in WITH_GRADIENT and self._layout.layers[visit.layer].trained.size > 0

    def _forward(self, layer: int, j: int, state: _StepState) -> None:
        forward_pass = state.passes[j]
        done = LayerForward(layer, j, forward_pass, [], [], [])
        while (call := forward_pass.pending) is not None and self._layer_of(call) == layer:
            with self._bound(call, "forward", layer, j, state.step) as (function, parameters):
                saving, keeps = self._saving(call, layer, done.kept), self._keeps(call, layer)
                outcome = call.forward(function, parameters, saving, keeps=keeps, settle=self._settle)
            if call.needs_gradient and layer in self._model.structure.without_backward:
                raise MegatrainError(f"{call.path} needs a gradient, but no backward is planned: a defect of the plan")
            self._seed(state.step, j, layer, 1)
            with self._device.timed(Op("between layers", layer, j)), self._collecting(call, layer, done.between):
                forward_pass.resume(outcome)
            done.entered.extend([port.tensor for port in call.ports])
        for hook in self._hooks:
            hook.after_forward(done)
        part = self._model.structure.layers[layer].part
        if part:
            release_spent(forward_pass, part)

    def _collecting(self, call: LayerCall, layer: int, between: list[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context that collects in `between` what a divided block's own forward saves after a call of a part.

        After the block's last call the model's own forward runs too, and what it saves stays on the device.
        """
        spec = self._model.structure.layers[layer]
        is_last = spec.part is None or (spec.part.is_last and call.path == spec.modules[-1])
        if is_last or self._plan.layers[layer].kept is Tier.HBM:
            return nullcontext()
        return collecting_saved(between, self._before_read)

    def _before_read(self, saved: torch.Tensor) -> None:
        for hook in self._hooks:
            hook.before_read(saved)

    def _before_backward(self, phase: Phase, layer: int, j: int) -> None:
        stop = Stop(phase, layer, j)
        for hook in self._hooks:
            hook.before_backward(stop)

    def _replay(self, layer: int, j: int, state: _StepState) -> None:
        """Run the layer's calls again, and refill the outputs whose memory was released."""
        self._before_backward(Phase.REPLAY, layer, j)
        for call in [call for call in state.passes[j].calls if self._layer_of(call) == layer]:
            with self._bound(call, "replay", layer, j, state.step) as (function, parameters):
                call.replay(function, parameters, self._saving(call, layer))

    def _keeps(self, call: LayerCall, layer: int) -> bool:
        """Return whether a forward of the call keeps its graph for the backward."""
        return self._plan.layers[layer].activations is ActivationPolicy.KEEP and self._model.keeps(call.path)

    def _saving(
        self, call: LayerCall, layer: int, kept: list[torch.Tensor] | None = None
    ) -> AbstractContextManager[None] | None:
        """Return the context for a forward of the call; None if that forward has no graph.

        A kernel of attention is chosen by whether a mask needs a gradient. Then a graph is built in every forward, so
        that it computes what the backward recomputes.
        """
        if self._keeps(call, layer):
            return self._model.saving(call.path, kept=None if self._plan.layers[layer].kept is Tier.HBM else kept)
        learned = call.path in self._model.structure.learned_masks
        return unsaved() if learned and self._model.compiled(call.path) is None else None

    def _loss(self, j: int, state: _StepState) -> Gradients:
        step = state.step
        share = LossShare(step.objective, step.total_weight, len(state.passes) * self._ranks.size, step.counts)
        found = self._step_loss.run(j, state.passes[j], state.targets[j], share)
        state.losses.extend(found.losses)
        for name, parts in found.metrics.items():
            state.metrics.setdefault(name, []).extend(parts)
        return found.gradients

    def _backward(self, layer: int, j: int, state: _StepState) -> Gradients:
        forward_pass = state.passes[j]
        self._before_backward(Phase.BACKWARD, layer, j)
        gradients: Gradients = {}
        while forward_pass.calls and self._layer_of(call := forward_pass.calls[-1]) == layer:
            forward_pass.flush_glue(call)
            if not call.has_graph:
                with self._bound(call, "recompute", layer, j, state.step) as (function, parameters):
                    call.recompute(function, parameters, self._model.saving(call.path))
            if call.path not in self._closed:  # once is enough: this does not change from step to step
                call.check_closed()
                self._closed.add(call.path)
            with self._device.compute(Op("backward", layer, j)):
                of_parameters = forward_pass.backward(call, self._settle)
            for segment, gradient in zip(self._model.segments[call.path], of_parameters, strict=True):
                name = segment.tied_to or segment.name
                gradients[name] = _add(gradients.get(name), gradient)
        return gradients

    def _keep_tied(self, layer: int, gradients: Gradients, tied: Gradients) -> None:
        """Set aside gradients of parameters that other layers own, and add those set aside for this layer.

        The order is autograd's within a micro-batch: the latest use contributes first.
        """
        for name, gradient in gradients.items():
            gradients[name] = _add(tied.pop(name, None), gradient)
        own = {segment.name for segment in self._layout.layers[layer].owned}
        tied |= {name: gradients[name] for name in gradients if name not in own}
        gradients |= {name: tied.pop(name) for name in own & tied.keys()}

    @contextmanager
    def _bound(
        self, call: LayerCall, name: str, layer: int, j: int, step: StepInput
    ) -> Iterator[tuple[Function, list[torch.Tensor]]]:
        """Bind the weights of the call's module and seed its random numbers, to compute it as operation `name`."""
        with self._model.bound(call.path) as bound, self._device.compute(Op(name, layer, j)):
            self._seed(step, j, layer, 0)
            yield bound

    def _layer_of(self, call: LayerCall) -> int:
        return self._model.structure.layer_of[call.path]

    def _seed(self, step: StepInput, micro_batch: int, layer: int, call: int) -> None:
        """Seed the random numbers of one layer (call 0), or of what the model computes after it (call 1)."""
        first = self._ranks.rank * len(step.micro_batches)
        self._device.seed(dropout_seed(step.dropout_seed, step.step, first + micro_batch, layer, call))


def _add(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
