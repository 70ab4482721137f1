"""Keeps all state of a model in one process, in ordinary memory, which stands for a disk, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.layout.split_master import join
from megatrain_ray.engine.optimizer.undo_log import Journal
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import spill_layout
from megatrain_ray.engine.plan.spill_layout import WORKING, SpillLayout
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.device_shard import DeviceShard
from megatrain_ray.engine.shards.spilling_shard import SpillingShard
from megatrain_ray.engine.spill.disk_weights import DiskWeights, ShardFile
from megatrain_ray.engine.spill.spill_ring import SpillRing
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.storage.blob_store import BlobStore, aligned_block
from tests.support.memory_store import MemoryStore
from tests.support.recipes import adamw_constants
from tests.support.reference import Recipe

WAIT_S = 60.0  # limit of a wait for the disk


class HostState:
    """Holds working copies and shards' state in ordinary memory; what nobody wrote is NaN."""

    device_shard: DeviceShard | None = None  # has the layers that are not here

    def __init__(self, layout: ModelLayout, plan: Plan, recipe: Recipe, *, saves_frozen: bool = True) -> None:
        self.layout = layout
        self.plan = plan
        self.working = _poisoned(layout.size_among(plan.weights_on_host), plan.precision.working_dtype)
        self.shard_layouts = [
            ShardLayout(
                layout,
                k,
                plan.shards.num_shards,
                layers=plan.host_layers,
                spilled=plan.spilled_layers,
                on_disk=plan.weights_on_disk,
            )
            for k in range(plan.shards.num_shards)
        ]
        self.files = [_file(s, plan) for s in self.shard_layouts]
        self.rings = [None if file is None else file.ring for file in self.files]
        self.tensors = [
            {kind: _poisoned(s.size_of(kind), dtype) for kind, dtype in plan.precision.state_kinds}
            for s in self.shard_layouts
        ]
        self.shards = [
            _shard_class(ring)(
                s,
                plan.precision,
                working=self.working,
                own=t,
                hyper=adamw_constants(recipe),
                num_threads=1,
                journal=memoryview(bytearray(Journal.num_bytes(s, plan.precision, 1))),
                saves_frozen=saves_frozen,
            )
            for s, t, ring in zip(self.shard_layouts, self.tensors, self.rings, strict=True)
        ]

    def load(self, source: WeightSource) -> None:
        for shard in self.shards:
            shard.load(source)

    def disk_weights(self, *, poison: bool) -> DiskWeights:
        files = [file.shard_file for file in self.files if file is not None]
        return DiskWeights(self.plan, self.layout, files, poison=poison)

    def whole(self, kind: str) -> Tensor:
        """Return one kind of state of all shards as one flat tensor, with every layer's padded flat at its start."""
        flat = torch.zeros(self.layout.size, dtype=self.tensors[0][kind].dtype)
        for s, t, ring in zip(self.shard_layouts, self.tensors, self.rings, strict=True):
            starts = s.v_starts if kind == "v" else s.starts
            for i, start in enumerate(self.layout.starts):
                span = s.span_of(i, kind)
                part = t[kind][starts[i] :][: span.size]
                if ring is not None and i in ring.layout.layers:
                    part = _read(ring, i, kind).view(flat.dtype)
                flat[start + span.start : start + span.stop] = part
        if self.device_shard is not None:
            of_device = self.device_shard.layout
            for i in self.device_shard.layers:
                starts, spans = (
                    (of_device.v_starts, of_device.v_spans) if kind == "v" else (of_device.starts, of_device.spans)
                )
                part = self.device_shard._own[kind][starts[i] :][: spans[i].size]
                flat[self.layout.starts[i] :][: spans[i].size] = part.cpu()
        return flat

    def working_of(self, layer: int) -> Tensor:
        """Return the working copy of a layer."""
        return self.whole_working()[self.layout.starts[layer] :][: self.layout.layers[layer].size]

    def whole_working(self) -> Tensor:
        """Return the working copies of all layers as one flat tensor, wherever they live."""
        flat = torch.zeros(self.layout.size, dtype=self.working.dtype)
        of_device = None if self.device_shard is None else self.device_shard.layout
        for i, layer in enumerate(self.layout.layers):
            if of_device is not None and self.device_shard is not None and i in self.device_shard.layers:
                part = self.device_shard.memory[of_device.working_starts[i] :][: layer.size].cpu()
            elif i in self.plan.weights_on_disk:
                parts = [_read(ring, i, WORKING) for ring in self.rings if ring is not None and ring.layout.state_of(i)]
                part = torch.cat(parts).view(flat.dtype)
            else:
                part = self.working[self.shard_layouts[0].working_starts[i] :][: layer.size]
            flat[self.layout.starts[i] :][: layer.size] = part
        return flat

    def masters(self) -> Tensor:
        if self.working.dtype == torch.float32:
            return self.whole_working()
        return join(self.whole_working(), self.whole("residual"))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            s.name: layer.view(flat[start : start + layer.size], s.name)
            for layer, start in zip(self.layout.layers, self.layout.starts, strict=True)
            for s in layer.trained_segments
        }

    def second_moments(self) -> dict[str, Tensor]:
        """Return the second moments by parameter, of those that AdamW trains."""
        without = {s.name for layer in self.layout.layers for s in layer.muon_segments}
        return {name: v for name, v in self.named(self.whole("v")).items() if name not in without}

    def frozen(self) -> dict[str, Tensor]:
        working = self.whole_working()
        return {
            s.name: layer.view(working[start : start + layer.size], s.name)
            for layer, start in zip(self.layout.layers, self.layout.starts, strict=True)
            for s in layer.owned
            if not s.group.trained
        }


def blob_in_memory(num_bytes: int) -> MemoryStore:
    """Return a store that stands for a disk, with one blob of this size in memory."""
    store = MemoryStore()
    store._blobs["spill"] = bytearray(num_bytes)
    return store


@dataclass(frozen=True)
class SpillMemory:
    """Holds what one shard spills with: memory that stands for a disk, and slots."""

    layout: SpillLayout
    memory: Tensor
    store: BlobStore
    ring: SpillRing

    @property
    def shard_file(self) -> ShardFile:
        return ShardFile(self.layout, SpillTable(self.layout, self.memory), self.store, "spill")


def _file(part: ShardLayout, plan: Plan) -> SpillMemory | None:
    """Return the spill memory of a shard, or None if nothing of it spills."""
    layout = spill_layout(plan, part)
    if not layout.extents:
        return None
    blobs = blob_in_memory(layout.blob_bytes)
    memory = torch.frombuffer(aligned_block(layout.memory_bytes), dtype=torch.uint8)
    store = SpillTable(layout, memory).packing(blobs) if plan.disk.packed else blobs
    return SpillMemory(layout, memory, store, SpillRing(layout, memory, store, "spill", WAIT_S, poison=True))


def _read(ring: SpillRing, layer: int, kind: str) -> Tensor:
    """Return a shard's part of a layer from the ring, as bytes."""
    extents = ring.layout.extents
    on_disk = (ring.read(k, extents[k].kinds[kind]) for k in ring.layout.state_of(layer))
    return torch.cat([torch.frombuffer(x, dtype=torch.uint8) for x in on_disk])


def _shard_class(ring: SpillRing | None) -> Callable[..., AdamShard]:
    return AdamShard if ring is None else partial(SpillingShard, ring)


def _poisoned(size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((size,), float("nan") if dtype.is_floating_point else 12345, dtype=dtype)
