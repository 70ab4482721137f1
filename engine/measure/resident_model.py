"""Runs steps of a model whose weights all stay on the device, as a baseline for streaming.

StepRunner runs its steps, so layers, head and loss are the same. Nothing moves between host and device, there is no
optimizer, and gradients are dropped layer by layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import OneRank
from megatrain_ray.engine.gradients.gradient_offloader import Departure, Fetch
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.skeleton import Skeleton
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import ChunkSums, Objective, OpenSum, chunk_sums
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.schedule import Visit, visits
from megatrain_ray.engine.plan.step_residency import needed_fragments
from megatrain_ray.engine.step.step_loss import StepLoss
from megatrain_ray.engine.step.step_runner import StepInput, StepOutput, StepRunner
from megatrain_ray.engine.step.warm_up import Coming, Rehearsal
from megatrain_ray.engine.weights_stream.bound_modules import BoundModules
from megatrain_ray.engine.weights_stream.bound_weights import Residents

# Standard deviation of the matrices. With zeros a GPU needs less power, and so runs faster, than with other values.
WEIGHT_STD = 0.02


class ResidentModel:
    """Holds a model on the device and runs its steps. Weights are random numbers, so losses mean nothing.

    Create and use it on one thread, with the device active.
    """

    def __init__(self, factory: ModelFactory, structure: ModelStructure, plan: Plan, device: Device) -> None:
        """Allocate the weights and build the model.

        plan: plan of a training run.
        Raises torch.OutOfMemoryError if the weights do not fit the device.
        """
        layout = structure.layout(plan.num_fragments)
        dtype = plan.precision.working_dtype
        memory = device.allocate(layout.size * dtype.itemsize)
        self._memory = memory
        self._plan = plan
        self._structure = structure
        self._layout = layout
        self.device = device
        self._visits = visits(len(plan.layers), 1, plan.step.order, layout.lowest_trained)
        self._skeleton = Skeleton(build_empty(factory, dtype), structure, device.torch_device)
        self._skeleton.attention.set(plan.compute.attention)
        self._residents = Residents(layout, dtype, memory)
        layers = _resident_plan(plan, 1).layers
        self._modules = BoundModules(
            structure, layout, self._skeleton, self._residents, layers, plan.compute.mlp_chunk_tokens
        )
        self._chunk_sums: ChunkSums = partial(chunk_sums, self._skeleton.logits)
        if plan.compute.compiled_loss:
            self._chunk_sums = CompiledCall("chunks of the loss", self._chunk_sums)
        self._layers = ResidentLayers(layout, dtype, memory, self._visits)

    def with_micro_batch(self, size: int, objective: Objective) -> StepRunner:
        """Return a runner for steps of one micro-batch of `size` sequences. What they need compiled is compiled first.

        objective: what the steps minimise.
        """
        plan, store = _resident_plan(self._plan, size), NoGradients(self.device)
        of_model = self._skeleton, self._modules, self._chunk_sums
        step_loss = StepLoss(plan, self._structure, self.device, *of_model, store)
        parts = self._structure, self._layout, self._memory, self._skeleton, self._residents, self._modules
        Rehearsal(plan, *parts, step_loss).run(Coming(objective))  # compiles; runs on weights of zeros
        _fill(self._memory.view(plan.precision.working_dtype), self._layout)
        return StepRunner(
            plan=plan,
            structure=self._structure,
            layout=self._layout,
            device=self.device,
            skeleton=self._skeleton,
            streamer=self._layers,
            residents=self._residents,
            modules=self._modules,
            step_loss=step_loss,
            store=store,
            activations=None,
            orthogonalizer=None,
            transfer=lambda transfer: None,
            device_shard=None,
            gate=None,
            ranks=OneRank(),
        )

    def run(self, runner: StepRunner, step: StepInput) -> StepOutput:
        """Run one forward and backward, and wait until the device has finished.

        runner: from `with_micro_batch`.
        """
        return runner.run(step, self._visits, None)


class ResidentLayers:
    """Provides the weights of each visit's layer. They are always on the device, at a fixed place."""

    def __init__(self, layout: ModelLayout, dtype: torch.dtype, memory: torch.Tensor, visits: Sequence[Visit]) -> None:
        """Find the region of every fragment.

        memory: 1-D uint8, with every layer's working copy at `layout.starts` (in elements of `dtype`).
        """
        self._needed = [needed_fragments(layout, visit.layer) for visit in visits]
        self._regions = {
            FragmentId(i, f): memory[(start + span.start) * dtype.itemsize : (start + span.stop) * dtype.itemsize]
            for i, (start, layer) in enumerate(zip(layout.starts, layout.layers, strict=True))
            for f, span in enumerate(layer.fragments)
        }

    @contextmanager
    def layer(self, visit: int) -> Iterator[Mapping[FragmentId, torch.Tensor]]:
        yield {fragment: self._regions[fragment] for fragment in self._needed[visit]}


class NoGradients:
    """Replaces the GradientStore of a step: it drops all gradients and measures no norm."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nothing = torch.zeros((), device=device.torch_device)
        self.waits_on_host = False
        self.norms: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        pass

    def open_sums(self, layer: int, names: Collection[str], *, first: bool) -> dict[str, OpenSum]:
        return {}

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None], *, first: bool, last: bool) -> None:
        pass

    def suspend(self, layer: int) -> Departure:
        return self.finish(layer)

    def fetch(self, layer: int) -> Fetch:
        return Fetch(layer, self._nothing, None, Future())

    def finish(self, layer: int) -> Departure:
        return Departure(layer, self._nothing, self._device.record(), Future(), final=True)

    def take(self, layer: int) -> torch.Tensor:
        return self._nothing

    def depart(self, layer: int) -> Departure:
        return self.finish(layer)

    def total_norm(self) -> torch.Tensor:
        return self._nothing


def _fill(weights: torch.Tensor, layout: ModelLayout) -> None:
    """Fill matrices with random numbers and vectors, most of which are scales of norms, with ones.

    weights: 1-D, every layer's flat at `layout.starts`.
    """
    weights.normal_(0.0, WEIGHT_STD)
    for start, layer in zip(layout.starts, layout.layers, strict=True):
        for segment in layer.owned:
            if len(segment.shape) < 2:
                layer.view(weights[start : start + layer.size], segment.name).fill_(1.0)


def _resident_plan(plan: Plan, micro_batch_size: int) -> Plan:
    """Return the plan changed for resident steps of one micro-batch.

    All activations are kept on the device for the backward, and each row is one document. Layers count as streaming
    (tier host), because all weights lie where a plan has its slots.
    """
    return replace(
        plan,
        layers=tuple(
            replace(
                layer,
                activations=ActivationPolicy.KEEP,
                activation_budget=1.0,
                weights=Tier.HOST,
                boundary=Tier.HBM,
                kept=Tier.HBM,
            )
            for layer in plan.layers
        ),
        step=replace(plan.step, micro_batch_size=micro_batch_size, num_micro_batches=1),
        gradients=replace(plan.gradients, sums=Tier.HBM),
        compute=replace(plan.compute, packed_attention=plan.compute.attention),
    )
