"""Runs steps of a model whose weights all stay on the device, as a baseline for streaming.

StepRunner runs its steps, so layers, head and loss are the same. Nothing moves between host and device, there is no
optimizer, and gradients are dropped layer by layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import OneRank
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import Objective, OpenSum
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.step.step_loss import StepLoss
from megatrain_ray.engine.step.step_runner import StepRunner
from megatrain_ray.engine.step.warm_up import WarmUp, WarmUpShapes
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.engine.weights_stream.layer_streamer import AllResidentSource

# Standard deviation of the matrices. With zeros a GPU needs less power, and so runs faster, than with other values.
WEIGHT_STD = 0.02


class ResidentModel:
    """Holds a model on the device and runs its steps. Weights are random numbers, so losses mean nothing.

    Create and use it on one thread, with the device active.
    """

    def __init__(self, factory: ModelFactory, structure: ModelStructure, plan: Plan, device: Device) -> None:
        """Allocate weights as a training run with this plan has, and build the model.

        Raises torch.OutOfMemoryError if the weights do not fit the device.
        """
        self.device = device
        self._plan = plan
        self._layout = layout = structure.layout(plan.num_fragments)
        itemsize = plan.precision.working_dtype.itemsize
        self._memory = device.allocate(layout.size * itemsize)
        self._model = BoundModel(factory, structure, layout, _resident_plan(plan, 1), device, self._memory)
        regions = {
            FragmentId(i, f): self._memory[(start + span.start) * itemsize : (start + span.stop) * itemsize]
            for i, (start, layer) in enumerate(zip(layout.starts, layout.layers, strict=True))
            for f, span in enumerate(layer.fragments)
        }
        self._model.weights.register_resident(self._memory, regions)

    def with_micro_batch(self, size: int, objective: Objective) -> StepRunner:
        """Return a runner for steps of one micro-batch of `size` sequences. What they need compiled is compiled first.

        objective: what the steps minimise.
        """
        plan, gradients = _resident_plan(self._plan, size), NoGradients(self.device)
        step_loss = StepLoss(plan, self.device, self._model, gradients)
        WarmUp(plan, self._memory, self._model, step_loss).run(WarmUpShapes(objective))  # runs on weights of zeros
        _fill(self._memory.view(plan.precision.working_dtype), self._layout)
        return StepRunner(plan, self.device, self._model, AllResidentSource(), step_loss, gradients, OneRank())


class NoGradients:
    """Replaces the GradientStore of a step: it drops all gradients and measures no norm."""

    def __init__(self, device: Device) -> None:
        self._norm = torch.zeros((), device=device.torch_device)
        self.norms: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        pass

    def open_sums(self, layer: int, names: Collection[str]) -> dict[str, OpenSum]:
        return {}

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None], *, last: bool) -> None:
        pass

    def finalize(self, layer: int) -> None:
        pass

    def total_norm(self) -> torch.Tensor:
        return self._norm


def _fill(weights: torch.Tensor, layout: ModelLayout) -> None:
    """Fill matrices with random numbers and vectors, most of which are scales of norms, with ones.

    weights: 1-D, every layer's flat at `layout.starts`.
    """
    weights.normal_(0.0, WEIGHT_STD)
    for start, layer in zip(layout.starts, layout.layers, strict=True):
        for segment in layer.owned:
            if len(segment.shape) < 2:
                segment.read_view(weights[start : start + layer.size]).fill_(1.0)


def _resident_plan(plan: Plan, micro_batch_size: int) -> Plan:
    """Return the plan changed for resident steps of one micro-batch.

    All weights live on the device, all activations are kept there for the backward, and each row is one document.
    """
    return replace(
        plan,
        layers=tuple(
            replace(
                layer,
                activations=ActivationPolicy.KEEP,
                activation_budget=1.0,
                weights=Tier.HBM,
                boundary=Tier.HBM,
                kept=Tier.HBM,
            )
            for layer in plan.layers
        ),
        step=replace(plan.step, micro_batch_size=micro_batch_size, num_micro_batches=1),
        gradients=replace(plan.gradients, sums=Tier.HBM),
        compute=replace(plan.compute, packed_attention=plan.compute.attention),
    )
