"""Implements the hooks of a step for what a plan does besides computing. Muon's hook is muon_updates.py.

At each point hooks are called in the order in which build_engine.py lists them. That order matters only in
`scale_known`: deferred gradients are requested first, then the device updates its own layers, then Muon's directions
are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain_ray.engine.activations.activation_store import ActivationStore
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.gradients.gradient_offloader import GradientOffloader, OffloadGradient
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.gradients.interfaces import LayerForward, StepHooks
from megatrain_ray.engine.layer_calls.part_memory import glue_storages, inputs_to_offload
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.activation_moves import Stop
from megatrain_ray.engine.plan.schedule import WITH_GRADIENT, Visit
from megatrain_ray.engine.shards.device_shard import DeviceGate, DeviceShard


class OffloadedActivations(StepHooks):
    """Offloads activations, or drops a layer's input, after its forward, and reloads them before its backward."""

    def __init__(self, structure: ModelStructure, store: ActivationStore) -> None:
        self._structure = structure
        self._store = store

    def begin_step(self, visits: Sequence[Visit]) -> None:
        self._store.begin(visits)

    def after_forward(self, forward: LayerForward) -> None:
        part = self._structure.layers[forward.layer].part
        entered, glue = forward.entered, list[torch.UntypedStorage]()
        if part:
            entered = inputs_to_offload(forward.forward_pass, part)
            glue = glue_storages(forward.between, forward.forward_pass, part)
        self._store.offload(forward.layer, forward.micro_batch, entered, forward.kept, glue)

    def before_backward(self, stop: Stop) -> None:
        self._store.reload(stop)

    def before_read(self, saved: torch.Tensor) -> None:
        self._store.check_resident(saved)


class OffloadedGradients(StepHooks):
    """Offloads complete gradients, those that Muon's directions complete excepted."""

    def __init__(self, store: GradientStore, offloader: GradientOffloader, deferred_layers: Sequence[int]) -> None:
        self._store = store
        self._offloader = offloader
        # Layers that shards update and whose gradient waits on the device until the scale is known, in the order in
        # which the shards update them.
        self._deferred_layers = deferred_layers

    def gradient_ready(self, layer: int, offload: OffloadGradient | None, params: UpdateParams | None) -> None:
        if offload is not None and offload.final:
            self._offloader.submit(offload)

    def scale_known(self, params: UpdateParams) -> None:
        self._offloader.defer([self._store.offload_deferred(layer) for layer in self._deferred_layers])


class OffloadedPartialSums(StepHooks):
    """Keeps partial sums of gradients on the host between micro-batches, and loads each one visit ahead."""

    def __init__(self, store: GradientStore, offloader: GradientOffloader, trained_layers: Sequence[int]) -> None:
        self._store = store
        self._offloader = offloader
        self._trained_layers = frozenset(trained_layers)
        self._visits: Sequence[Visit] = ()

    def begin_step(self, visits: Sequence[Visit]) -> None:
        self._visits = visits

    def after_visit(self, visit: Visit) -> None:
        if self._has_gradient(visit) and not visit.last:
            self._offloader.submit(self._store.offload_partial(visit.layer))
        # The sum of the next visit is on its way. Its region differs from that of the visit after it.
        for coming in self._visits[visit.index + 2 : visit.index + 3]:
            if self._has_gradient(coming) and coming.micro_batches[0] > 0:
                self._offloader.submit(self._store.load_partial(coming.layer))

    def _has_gradient(self, visit: Visit) -> bool:
        return visit.phase in WITH_GRADIENT and visit.layer in self._trained_layers


class DeviceUpdates(StepHooks):
    """Updates the layers that live on the device, each as soon as its gradient and its scale are known."""

    def __init__(self, shard: DeviceShard, store: GradientStore, device: Device, gate: DeviceGate | None) -> None:
        self._shard = shard
        self._store = store
        self._device = device
        self._gate = gate  # tells a save about the device's updates, if these layers are saved

    def gradient_ready(self, layer: int, offload: OffloadGradient | None, params: UpdateParams | None) -> None:
        if offload is None and params is not None:
            self._update(layer, params)

    def scale_known(self, params: UpdateParams) -> None:
        for layer in self._shard.updated:
            self._update(layer, params)

    def end_step(self, update: int) -> None:
        if self._gate:
            self._gate.finish(update, self._device.record())

    def _update(self, layer: int, params: UpdateParams) -> None:
        if self._gate:
            self._gate.before_update(layer, params.update)
        self._shard.update(layer, self._store.pop_deferred(layer), params)
