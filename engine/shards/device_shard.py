"""Keeps the state of the layers that live on the device, and updates them there.

Their weights need no upload, and their gradients never leave the device. Updates are ordered among the device's other
work, so only a save waits for a generation of these layers (DeviceGate).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.layout.split_master import join_into
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, UpdateParams
from megatrain_ray.engine.optimizer.undo_log import ParamSlice
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.shards.save_gate import SaveGate
from megatrain_ray.engine.shards.shard_state import ShardState
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.engine.weights.saved_values import as_saved, restore_pieces
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_writer import Buffer, Piece
from megatrain_ray.virtual_clock import Op, Stage

RESTORED_BYTES = 256 << 20  # most that a restore holds on the host at a time


class DeviceShard(ShardState):
    """Keeps state in device memory, where the device updates it.

    The compute thread calls `update`; everything else may be called from any other thread.
    """

    def __init__(self, plan: Plan, layout: ModelLayout, device: Device, hyper: AdamWConstants) -> None:
        whole = replace(layout.on_host(0, 1), aliased_size=None)  # every device holds these layers whole
        of_device = ShardLayout(whole, 0, 1, layers=plan.hbm_layers)
        kinds = {"working": plan.precision.working_dtype, **dict(plan.precision.state_kinds)}
        sizes = {kind: of_device.size_of(kind) for kind in kinds} | {"working": of_device.working_size}
        tensors = {kind: device.allocate(sizes[kind] * dtype.itemsize).view(dtype) for kind, dtype in kinds.items()}
        self.memory = tensors.pop("working")
        super().__init__(
            of_device, plan.precision, working=self.memory, own=tensors, saves_frozen=plan.saves.includes_frozen
        )
        self.layers = tuple(sorted(plan.hbm_layers))
        self.updated = tuple(i for i in self.layers if layout.layers[i].trained.size)
        self._device = device
        self.spans = device.spans
        # The random bits that round bf16 moments depend on the parameter, so such parameters stay apart.
        join = _joined if hyper.moments_seed is None else list
        self._parts = {layer: join(self.parts(layer, hyper)) for layer in self.updated}
        self._wide_copies = {layer: [*self._wide(layer)] for layer in self.updated}
        self._kernel = device.open_update_kernel(hyper)

    def regions(self) -> Mapping[FragmentId, Tensor]:
        """Return the bytes of every fragment's working copy, as 1-D uint8 views of device memory."""
        found: dict[FragmentId, Tensor] = {}
        for i in self.layers:
            for f, span in enumerate(self.layout.model.layers[i].fragments):
                start = self.layout.working_starts[i] + span.start
                found[FragmentId(i, f)] = self.memory[start : start + span.size].view(torch.uint8)
        return found

    def working_of(self, layer: int) -> Tensor:
        """Copy a layer's working copy to the host and return it: 1-D, padded."""
        start = self.layout.working_starts[layer]
        return self.memory[start : start + self.layout.model.layers[layer].size].cpu()

    def update(self, layer: int, gradient: Tensor, params: UpdateParams) -> None:
        """Submit an update of the layer to the device.

        gradient: on the device, 1-D, padded, bf16 or fp32.
        """
        if params.skip:
            return
        with self._device.compute(Op("update", layer)):
            self._kernel.update(self._parts[layer], gradient, params, None)
            for working, residual, wide in self._wide_copies[layer]:
                join_into(working, residual, wide)

    def load(self, source: WeightSource, num_threads: int = 1) -> None:
        super().load(source, num_threads)
        self._own["m"][:1].cpu()  # waits until the zeros are written: updates run on another stream

    def restore(self, save_folder: Path, manifest: Manifest) -> None:
        """Fill every layer from a save. Raises what `restore_pieces` raises."""
        for layer in self.layers:
            for piece in self.pieces(layer):
                for part in piece.cut(RESTORED_BYTES):
                    on_host = _on_host(part)
                    restore_pieces(save_folder, manifest, as_saved([on_host], manifest, self.layout.model))
                    for there, here in _pairs(part, on_host):
                        there.copy_(here)
            self.refresh_wide(layer)
        self.memory[:1].cpu()  # waits until wide copies are written: forwards run on another stream

    def fetch(self, part: Piece) -> Piece:
        on_host = _on_host(part)
        for there, here in _pairs(part, on_host):
            here.copy_(there)
        return on_host

    def close(self) -> None:
        self._kernel.close()

    def _copy(self, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        copies = [(here, there, Op("copy", layer, num_bytes=there.nbytes)) for here, there in pairs]
        for event in [self._device.copy(Stage.D2H, here, there, op, []) for here, there, op in copies]:
            event.synchronize()

    def _buffer(self, tensor: Tensor) -> Buffer:
        return tensor


class DeviceGate(SaveGate):
    """Is the gate of the device's shard, and publishes the device's updates in the shared words, as a shard its own.

    The compute thread is the one that updates.
    """

    def __init__(
        self, shard: DeviceShard, words: SharedUpdateState, index: int, spare: SnapshotBuffers, timeout_s: float
    ) -> None:
        """Create the gate, as every SaveGate; updates visit the layers in order."""
        super().__init__(shard, words, index, shard.updated, spare, timeout_s)
        self._updated = shard.updated
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device updates")
        self._last: Future[None] | None = None

    def finish(self, update: int, updated: Event) -> None:
        """Publish, once the event is reached, that the device's layers have generation `update`. Compute thread only.

        Returns before the event, but not before the previous update is published. Raises what went wrong with that one.
        """
        if self._last is not None:
            self._last.result()
        self._last = self._executor.submit(self._publish, update, updated)

    def _publish(self, update: int, updated: Event) -> None:
        try:
            updated.synchronize()
        except BaseException:
            self._words.fail(self._index)
            raise
        for layer in self._updated:
            self._words.generations.finish(self._index, layer, update)

    def close(self) -> None:
        """Stop the thread that publishes, once it has nothing left to do. Idempotent."""
        self._executor.shutdown()


def _joined(parts: Sequence[ParamSlice]) -> list[ParamSlice]:
    """Join neighbouring parts that are updated alike into one, since each part costs the host a kernel launch.

    Parameters begin aligned. So a parameter that another one adjoins has no tail, which kernels compute differently
    from the rest.
    """
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
    for tensor, buffer in zip(there.buffers, here.buffers, strict=True):
        yield cast(Tensor, tensor), torch.frombuffer(buffer, dtype=torch.uint8)


def _on_host(part: Piece) -> Piece:
    return part._replace(buffers=[torch.empty(len(buffer), dtype=torch.uint8).numpy().data for buffer in part.buffers])
