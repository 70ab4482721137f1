"""Computes Muon's directions on the device, for all matrices of a layer that this rank owns. Compute thread only.

A direction is the orthogonalized momentum of a matrix. Without clipping, a layer's directions are computed in its
backward, while its gradient is on the device. With clipping, the scale is known only after the backward. Gradients then
wait on the host and are reloaded layer by layer in the order of the update; the directions are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.gradients.gradient_offloader import Completion, Departure, Fetch, MomentumFetch, Transfer
from megatrain_ray.engine.gradients.gradient_slots import GradientSlots, wait_for
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.optimizer.matrix_parts import largest_part
from megatrain_ray.engine.optimizer.muon import Muon, direction, matrices
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.virtual_clock import Op


class Orthogonalizer:
    """Computes Muon's directions for one plan.

    None of it is state: the directions are discarded once every shard has the update.
    """

    def __init__(
        self,
        plan: Plan,
        layout: ModelLayout,
        device: Device,
        store: GradientStore,
        muon: Muon,
        transfer: Callable[[Transfer], None],
        *,
        rank: int = 0,
        poison: bool,
    ) -> None:
        """Allocate device memory for momenta and directions.

        transfer: submits a transfer request.
        rank: this rank among those of the plan.
        """
        self._timeout_s = plan.update_deadline_s + DEADLINE_S

        def slots(sizes: tuple[int, ...], itemsize: int) -> GradientSlots:
            needed = {
                i: largest_part(layout.layers[i], plan.hosts.num_gpus) * itemsize for i in reversed(layout.with_muon)
            }
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
        self._asked: dict[int, Fetch] = {}

    def begin(self) -> None:
        """Prepare for a step."""
        self._momenta.reset()
        self._directions.reset()
        self._asked.clear()

    def expect(self, layer: int) -> None:
        """Request the momenta of a layer whose gradient the work submitted next will complete.

        Does nothing with clipping: `run` requests them then.
        """
        if self._in_backward and self._layout.layers[layer].num_muon:
            self._ask(layer)

    def complete(self, departure: Departure) -> None:
        """Submit the offload of a complete gradient.

        Without clipping, also compute and offload the directions of a layer that Muon trains something of.
        """
        if departure.final or not self._in_backward:
            self._transfer(departure)
            return
        completion = self._direct(departure.layer, departure.flat, 1.0)
        self._transfer(replace(departure, after=self._device.record()))  # the directions read the gradient until here
        self._transfer(completion)

    def run(self, scale: float) -> None:
        """Compute and offload all directions of a clipped step, after its backward.

        Does nothing without clipping.

        scale: clip scale of the update.
        """
        for layer in () if self._in_backward else self._layout.with_muon:
            self._transfer(self._store.recall(layer))
            self._ask(layer)
            completion = self._direct(layer, self._store.recalled(layer), scale)
            self._store.let_go(layer)
            self._transfer(completion)

    def _ask(self, layer: int) -> None:
        num_bytes = self._parts.gradient_span(layer).size * torch.float32.itemsize
        self._asked[layer] = fetch = self._momenta.fetch(layer, num_bytes)
        self._transfer(MomentumFetch(fetch))

    def _direct(self, layer: int, gradient: torch.Tensor, scale: float) -> Completion:
        """Submit the computation of a layer's directions; return the request to offload them.

        gradient: this rank's part, 1-D. It is only read.
        """
        own, fetch = self._parts.gradient_span(layer), self._asked.pop(layer)
        wait_for(self._device, fetch.done, "h2d", self._timeout_s)
        momentum = fetch.region.view(torch.float32)
        made = self._directions.take(layer, own.size * DIRECTION_BYTES).view(torch.bfloat16)
        with self._device.compute(Op("orthogonalize", layer)), torch.no_grad():
            for run in self._layout.layers[layer].runs(own):
                if run.segment.muon:
                    start = run.padded - own.start
                    of_run = (part[start : start + run.length] for part in (gradient, momentum, made))
                    for g, m, o in zip(*(matrices(values, run.segment.shape) for values in of_run), strict=True):
                        o.copy_(direction(g, m, scale, self._muon))
        after = self._device.record()
        self._momenta.leave(layer).set_result(after)
        return Completion(layer, made, after, self._directions.leave(layer))
