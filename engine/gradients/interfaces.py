"""Defines what a step consists of: where its layers come from, where its gradients go, and hooks at fixed points.

In training layers are streamed and gradients are stored. To measure the resident ceiling, all layers stay on the device
and gradients are discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from megatrain_ray.engine.gradients.gradient_offloader import OffloadGradient
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.model.chunked_loss import OpenSum
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.activation_moves import Stop
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.schedule import Visit


class LayerSource(Protocol):
    """Provides the layers of each visit. Implemented by LayerStreamer and AllResidentSource."""

    def layer(self, visit: int) -> AbstractContextManager[Mapping[FragmentId, torch.Tensor]]:
        """Yield the visit's fragments on the device, in use until the context ends. Compute thread only."""

    def sync_collective_order(self, visit: int) -> None:
        """Give collectives one order on all ranks. The step calls it in a visit, before the ranks sum a gradient."""


class GradientAccumulator(Protocol):
    """Receives gradients. Implemented by GradientStore, which documents each method, and by NoGradients."""

    norms: dict[str, torch.Tensor]

    def begin(self) -> None: ...

    def open_sums(self, layer: int, names: Collection[str]) -> dict[str, OpenSum]: ...

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None], *, last: bool) -> None: ...

    def finalize(self, layer: int) -> OffloadGradient | None: ...

    def total_norm(self) -> torch.Tensor: ...


class LayerForward(NamedTuple):
    """Holds what the forward of one micro-batch through one layer left."""

    layer: int
    micro_batch: int
    forward_pass: ForwardPass
    entered: list[torch.Tensor]  # tensors that entered calls of the layer
    kept: list[torch.Tensor]  # tensors saved for the backward, if they are to leave the device
    between: list[torch.Tensor]  # saved by the forward of the divided block around the layer, between calls of parts


class StepHooks:
    """Extends a step at fixed points. A subclass overrides those that it needs; the others do nothing.

    Methods are documented in the order of a step. All run on the compute thread and only submit work to the device: in
    a captured step, those up to `gradient_ready` run once, while the step is captured.
    """

    def begin_step(self, visits: Sequence[Visit]) -> None:
        """Prepare for a step with these visits."""

    def before_visit(self, visit: Visit) -> None:
        """Act once the visit's layer is on the device."""

    def after_forward(self, forward: LayerForward) -> None:
        """Act after the forward of one micro-batch through one layer, but not after a recomputation of it."""

    def before_backward(self, stop: Stop) -> None:
        """Act before a layer's backward, or its replay, of one micro-batch."""

    def before_read(self, saved: torch.Tensor) -> None:
        """Act before a backward reads a tensor of `LayerForward.between`."""

    def gradient_ready(self, layer: int, offload: OffloadGradient | None, params: UpdateParams | None) -> None:
        """Act when the layer's gradient is complete, in the layer's last visit.

        offload: the request to offload it; None if it waits on the device.
        params: of the update, if that does not wait for the norm of all gradients.
        """

    def after_visit(self, visit: Visit) -> None:
        """Act after the visit, when its layer may leave the device."""

    def scale_known(self, params: UpdateParams) -> None:
        """Act after the backward of a clipped step, once its update is committed."""

    def end_step(self, update: int) -> None:
        """Act once all work of the step is submitted."""
