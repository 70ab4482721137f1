"""DeviceShard: the layers that live on the device. Their weights need no upload, their gradients never leave, and the
device updates them, in the order of its own work: nobody waits for a generation of theirs but a save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.host.interfaces import UpdateHeader
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import AdamState, Hyper
from megatrain_ray.engine.optimizer.undo_log import Part
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.shards.shard_state import ShardState
from megatrain_ray.engine.weights.restore import as_saved, restore_pieces
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_writer import Buffer, Piece
from megatrain_ray.virtual_clock import Op, Stage

RESTORED_BYTES = 256 << 20  # on the host at a time


class UpdateGate(Protocol):
    """Who must know of the device's updates: a save."""

    def enter(self, layer: int, update: int) -> None:
        """Returns when the layer may be overwritten by `update`."""

    def finish(self, update: int, done: Event) -> None:
        """Every layer has the update once the event has come."""


class DeviceShard(ShardState):
    """In device memory, updated by the device. Updates come from the compute thread, everything else from any other."""

    def __init__(self, plan: Plan, layout: ModelLayout, device: Device, hyper: Hyper) -> None:
        whole = replace(layout.on_host(0, 1), aliased_size=None)  # each device has all of them
        of_device = ShardLayout(whole, 0, 1, layers=plan.hbm_layers)
        kinds = {"working": plan.precision.working_dtype, **dict(plan.precision.state_kinds)}
        sizes = {kind: of_device.size_of(kind) for kind in kinds} | {"working": of_device.working_size}
        tensors = {kind: device.allocate(sizes[kind] * dtype.itemsize).view(dtype) for kind, dtype in kinds.items()}
        self.memory = tensors.pop("working")
        super().__init__(of_device, plan.precision, working=self.memory, own=tensors, saves_frozen=plan.saves_frozen)
        self.layers = tuple(sorted(plan.hbm_layers))
        self.updated = tuple(i for i in self.layers if layout.layers[i].trained.size)
        self._device = device
        self.spans = device.spans
        # Each parameter's moments in bf16 have random bits of their own.
        join = _joined if hyper.moments_seed is None else list
        self._parts = {layer: join(self.parts(layer, hyper)) for layer in self.updated}
        self._kernel = device.open_update_kernel(hyper)

    def regions(self) -> Mapping[FragmentId, Tensor]:
        """The bytes of every fragment's working copy."""
        found: dict[FragmentId, Tensor] = {}
        for i in self.layers:
            for f, span in enumerate(self.layout.model.layers[i].fragments):
                start = self.layout.working_starts[i] + span.start
                found[FragmentId(i, f)] = self.memory[start : start + span.size].view(torch.uint8)
        return found

    def working_of(self, layer: int) -> Tensor:
        """A layer's working copy, brought to the host: 1-D, padded."""
        start = self.layout.working_starts[layer]
        return self.memory[start : start + self.layout.model.layers[layer].size].cpu()

    def update(self, layer: int, gradient: Tensor, header: UpdateHeader) -> None:
        """Submits an update of the layer. `gradient`: on the device, 1-D, padded, bf16 or fp32."""
        if header.skip:
            return
        with self._device.compute(Op("update", layer)):
            self._kernel.update(self._parts[layer], gradient, header.rates, None)

    def load(self, source: WeightSource, num_threads: int = 1) -> None:
        super().load(source, num_threads)
        self._own["m"][:1].cpu()  # the zeros are there: updates come from another stream

    def restore(self, save_folder: Path, manifest: Manifest) -> None:
        """Fills every layer from a save. Raises what `restore_pieces` does."""
        for layer in self.layers:
            for piece in self.pieces(layer):
                for part in piece.cut(RESTORED_BYTES):
                    on_host = _on_host(part)
                    restore_pieces(save_folder, manifest, as_saved([on_host], manifest, self.layout.model))
                    for there, here in _pairs(part, on_host):
                        there.copy_(here)

    def fetch(self, part: Piece) -> Piece:
        on_host = _on_host(part)
        for there, here in _pairs(part, on_host):
            here.copy_(there)
        return on_host

    def close(self) -> None:
        """Ends the kernel's threads where it has some. Idempotent."""
        self._kernel.close()

    def _copy(self, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        copies = [(here, there, Op("copy", layer, num_bytes=there.nbytes)) for here, there in pairs]
        for event in [self._device.copy(Stage.D2H, here, there, op, []) for here, there, op in copies]:
            event.synchronize()

    def _buffer(self, tensor: Tensor) -> Buffer:
        return tensor


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours that are updated alike in one part: each costs the host a launch. Parameters begin aligned, so one
    that another adjoins has no tail, which kernels compute otherwise than the rest."""
    joined = list(parts[:1])
    for part in parts[1:]:
        before = joined[-1]
        adjoins = before.gradient_start + before.length == part.gradient_start
        if adjoins and before.weighting == part.weighting:
            length = before.length + part.length
            tensors = (None if t is None else t.as_strided((length,), (1,)) for t in before.state)
            joined[-1] = before._replace(state=AdamState(*tensors))  # type: ignore[arg-type]  # None where it was
        else:
            joined.append(part)
    return joined


def _pairs(there: Piece, here: Piece) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of a piece on the device, and those of the same piece on the host."""
    for tensor, buffer in zip(there.buffers, here.buffers, strict=True):
        yield cast(Tensor, tensor), torch.frombuffer(buffer, dtype=torch.uint8)


def _on_host(part: Piece) -> Piece:
    """A piece like it, over memory of its own."""
    return part._replace(buffers=[torch.empty(len(buffer), dtype=torch.uint8).numpy().data for buffer in part.buffers])
