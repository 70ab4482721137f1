"""Runs every kind of layer once before the first step, so that no step and no deadline waits for a compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.layer_call import Function, LayerCall, Outcome
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.model.chunked_loss import Objective, Targets
from megatrain_ray.engine.objectives.distillation import TopTokens
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.residency import FragmentId, needed_fragments, streamed
from megatrain_ray.engine.step.step_loss import StepLoss
from megatrain_ray.engine.weights_stream.bound_model import BoundModel

T = TypeVar("T")


@dataclass(frozen=True)
class WarmUpShapes:
    """Describes the steps to come, as far as the plan does not."""

    objective: Objective = field(default_factory=Objective)
    packed: bool = False  # whether some of their rows hold several documents
    weighted: bool = False  # whether their targets have loss weights
    evaluates: bool = False  # whether held-out data are evaluated between them
    trains: bool = True  # whether there is a step at all
    teacher: TopTokens | None = None  # what is known of a teacher's predictions
    row_parts: int = 1  # rows that each row of the plan is divided into
    images: bool = False  # whether some of their rows hold images


class WarmUp:
    """Runs micro-batches of zeros through every kind of layer.

    Weights in slots are zeros, in the same memory as in a step. Compute thread only, before any step.
    """

    def __init__(self, plan: Plan, memory: torch.Tensor, model: BoundModel, step_loss: StepLoss) -> None:
        self._plan = plan
        self._memory = memory  # the allocation that all slots are cut from
        self._model = model
        self._proxied = model.proxied
        self._step_loss = step_loss

    def run(self, coming: WarmUpShapes) -> None:
        """Run one micro-batch of each kind of which some part is compiled. Do nothing if no part is."""
        plan = self._plan
        compiled = plan.compute.compiled_loss or any(layer.compiled for layer in plan.layers)
        whole = compiled or plan.compute.attention is Attention.FLEX
        packed = plan.compute.packed_attention is Attention.FLEX or (compiled and coming.packed)
        if not whole and not packed:
            return
        self._memory.zero_()
        seq_len, num_rows = plan.step.seq_len // coming.row_parts, plan.step.micro_batch_size * coming.row_parts
        index = torch.arange(seq_len, device=self._memory.device).expand(num_rows, -1)
        kinds: list[tuple[Attention, torch.Tensor | None]] = [(plan.compute.attention, None)] if whole else []
        if packed:
            kinds.append((plan.compute.packed_attention, index % (plan.step.seq_len // 2 + 1)))  # two documents a row
        with warnings.catch_warnings(action="ignore"):  # compilers warn about what they do with a model
            for (attention, positions), images in product(kinds, (False, True) if coming.images else (False,)):
                self._proxied.attention.set(attention)
                ids = torch.zeros_like(index)
                forward: Callable[[], Any] = partial(self._proxied.forward, ids, positions)
                if images:
                    forward = self._proxied.forward_of_images(ids, positions, plan.precision.working_dtype)
                if coming.trains:
                    self._train(ids, forward, coming)
                if coming.evaluates and compiled:
                    self._evaluate(forward)

    def _train(self, ids: torch.Tensor, forward: Callable[[], Any], coming: WarmUpShapes) -> None:
        results: dict[object, Any] = {}  # by kind of call: a call like an earlier one is not run again
        forward_pass = ForwardPass(forward)
        forward_pass.start()
        while (call := forward_pass.pending) is not None:
            kind = self._model.graph_of(call.path), call.kind
            if kind in results:
                forward_pass.answer(results[kind])
                continue
            outcome = self._run(call, self._forward_and_backward)
            if not any(outcome.added):  # not reused if the layer added to a container: that belongs to this layer only
                results[kind] = outcome.result
            forward_pass.resume(outcome)
        weighted = coming.weighted or coming.objective.logprob_objective is not None  # it makes loss weights
        weights = torch.ones_like(ids, dtype=torch.float32) if weighted else None
        teacher = coming.teacher.zeros(ids) if coming.teacher else None
        targets = Targets(torch.zeros_like(ids), weights, teacher=teacher)
        self._loss(forward_pass.final_hidden, targets, coming.objective)
        forward_pass.free()

    def _evaluate(self, forward: Callable[[], Any]) -> None:
        results: dict[object, Any] = {}
        forward_pass = ForwardPass(forward)
        with self._proxied.evaluating(), torch.no_grad():
            forward_pass.start()
            while (call := forward_pass.pending) is not None:
                kind = self._model.graph_of(call.path), call.kind
                if kind not in results or call.given.containers:
                    results[kind] = self._run(call, lambda call, function, _: call.infer(function))
                forward_pass.answer(results[kind])

    def _run(self, call: LayerCall, work: Callable[[LayerCall, Function, list[torch.Tensor]], T]) -> T:
        """Do `work` with the call, whose layer is bound; before that with a twin of it, if its function compiles."""
        with self._model.weights.bound(self._placed(call.path)), self._model.bound(call.path) as (function, parameters):
            compiled = self._model.compiled(call.path)
            if compiled is not None and compiled.problem is None:
                _compile(compiled, partial(work, call.twin(), function, parameters))
            return work(call, function, parameters)

    def _forward_and_backward(self, call: LayerCall, function: Function, parameters: list[torch.Tensor]) -> Outcome:
        policy = self._plan.layers[self._model.structure.layer_of[call.path]].activations
        keeps = policy is ActivationPolicy.KEEP and self._model.keeps(call.path)
        outcome = call.forward(function, parameters, self._model.saving(call.path) if keeps else None)
        if call.needs_gradient:
            if not call.has_graph:
                call.recompute(function, parameters, self._model.saving(call.path))
            call.backward([torch.zeros_like(tensor) for tensor in outcome.floating], [None] * len(call.ports))
        call.free()
        return outcome

    def _loss(self, hidden: torch.Tensor, targets: Targets, objective: Objective) -> None:
        run = partial(self._step_loss.run_warm_up, hidden, targets, objective)
        with self._model.weights.bound(self._placed(self._model.structure.layers[-1].modules[-1])):
            if self._step_loss.compiled is not None:
                _compile(self._step_loss.compiled, run)
            run()

    def _placed(self, path: str) -> Mapping[FragmentId, torch.Tensor]:
        """Return slot memory for the layer of a module and for layers it shares parameters with, unless in HBM."""
        regions, start = dict[FragmentId, torch.Tensor](), 0
        needed = needed_fragments(self._model.layout, self._model.structure.layer_of[path])
        for fragment in streamed(needed, self._plan.hbm_layers):
            span = self._model.layout.layers[fragment.layer].fragments[fragment.index]
            stop = start + span.size * self._plan.precision.working_dtype.itemsize
            regions[fragment] = self._memory[start:stop]
            start = stop
        return regions


def _compile(call: CompiledCall, run: Callable[[], object]) -> None:
    """Call `run` in a rehearsal of `call`, so that it compiles; if it fails, run uncompiled from then on."""
    try:
        with call.rehearsal():
            run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's failures are of any class
        call.give_up(error)
