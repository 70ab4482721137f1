"""Computes Muon's directions on the device, for all matrices of a layer that this rank owns. Compute thread only.

A direction is the orthogonalized momentum of a matrix. Without clipping, a layer's directions are computed in its
backward, while its gradient is on the device. With clipping, the scale is known only after the backward. Gradients then
wait on the host and are reloaded layer by layer in the order of the update; the directions are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.gradients.gradient_offloader import (
    LoadMomentum,
    OffloadDirections,
    OffloadGradient,
    TransferRequest,
)
from megatrain_ray.engine.gradients.gradient_state import GradientSlots, wait_for
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.gradients.interfaces import StepHooks
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.optimizer.muon import Muon, direction, largest_part, matrices
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.schedule import Visit
from megatrain_ray.virtual_clock import Op


class MuonUpdates(StepHooks):
    """Computes and offloads Muon's directions, and offloads the gradients that they complete.

    None of it is state: the directions are discarded once every shard has the update.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, device: Device, store: GradientStore, muon: Muon,
        transfer: Callable[[TransferRequest], None], *, rank: int = 0, poison: bool,
    ) -> None:  # fmt: skip
        """Allocate device memory for momenta and directions.

        transfer: submits a transfer request.
        rank: this rank among those of the plan.
        """
        self._timeout_s = plan.update_deadline_s + DEADLINE_S

        largest = {i: largest_part(layout.layers[i], plan.hosts.num_gpus) for i in reversed(layout.with_muon)}

        def slots(sizes: tuple[int, ...], itemsize: int) -> GradientSlots:
            needed = {i: size * itemsize for i, size in largest.items()}
            return GradientSlots(device, sizes, needed, self._timeout_s, poison=poison)

        self._layout = layout
        self._parts = RankParts(layout, rank, plan.hosts.num_gpus)
        self._device = device
        self._store = store
        self._muon = muon
        self._transfer = transfer
        self._in_backward = plan.step.update_order is UpdateOrder.BACKWARD
        self._momenta = slots(plan.slots.momentum_bytes, torch.float32.itemsize)
        self._directions = slots(plan.slots.direction_bytes, DIRECTION_BYTES)
        self._loads: dict[int, LoadMomentum] = {}

    def begin_step(self, visits: Sequence[Visit]) -> None:
        self._momenta.reset()
        self._directions.reset()
        self._loads.clear()

    def before_visit(self, visit: Visit) -> None:
        """Without clipping, request the momenta of a layer whose gradient the visit completes."""
        if visit.last and self._in_backward and self._layout.layers[visit.layer].num_muon:
            self._load_momenta(visit.layer)

    def gradient_ready(self, layer: int, offload: OffloadGradient | None, params: UpdateParams | None) -> None:
        """Offload a gradient that Muon trains something of; without clipping, compute its directions first."""
        if offload is None or offload.final:
            return
        if not self._in_backward:
            self._transfer(offload)
            return
        directions = self._compute(layer, offload.flat, 1.0)
        self._transfer(replace(offload, after=self._device.record()))  # the directions read the gradient until here
        self._transfer(directions)

    def scale_known(self, params: UpdateParams) -> None:
        """Compute and offload all directions of a clipped step."""
        for layer in self._layout.with_muon:
            self._transfer(self._store.reload_final(layer))
            self._load_momenta(layer)
            with self._store.reloaded(layer) as gradient:
                directions = self._compute(layer, gradient, params.scale)
            self._transfer(directions)

    def _load_momenta(self, layer: int) -> None:
        num_bytes = self._parts.gradient_span(layer).size * torch.float32.itemsize
        self._loads[layer] = self._momenta.load(LoadMomentum, layer, num_bytes)
        self._transfer(self._loads[layer])

    def _compute(self, layer: int, gradient: torch.Tensor, scale: float) -> OffloadDirections:
        """Submit the computation of a layer's directions; return the request to offload them.

        gradient: this rank's part, 1-D. It is only read.
        """
        own, load = self._parts.gradient_span(layer), self._loads.pop(layer)
        wait_for(self._device, load.done, "h2d", self._timeout_s)
        momentum = load.region.view(torch.float32)
        directions = self._directions.allocate(layer, own.size * DIRECTION_BYTES).view(torch.bfloat16)
        with self._device.compute(Op("orthogonalize", layer)), torch.no_grad():
            for run in self._layout.layers[layer].runs(own):
                if run.segment.muon:
                    start = run.padded - own.start
                    flats = (flat[start : start + run.length] for flat in (gradient, momentum, directions))
                    for g, m, o in zip(*(matrices(flat, run.segment.shape) for flat in flats), strict=True):
                        o.copy_(direction(g, m, scale, self._muon))
        after = self._device.record()
        self._momenta.release(layer).set_result(after)
        return OffloadDirections(layer, directions, after, self._directions.release(layer))
