"""The plan: which tier everything lives on, how a step runs, and how many bytes that takes. The engine obeys it.

The schema is versioned and stands in docs/plan_format.md; `plan.json` in a run directory is `Plan.to_json()`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Literal

import torch
from pydantic import TypeAdapter

from megatrain_ray.engine.device.deadlines import transfer_deadline_s
from megatrain_ray.engine.device.numa_homes import GpuHome, Home
from megatrain_ray.engine.layout.precision import SECOND_MOMENT_BYTES, Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.plan.residency import SlotSpec
from megatrain_ray.engine.plan.schedule import LoopOrder, Visit, visits
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.storage.disk_io import DiskIo


class ActivationPolicy(Enum):
    """What of a layer's forward waits for its backward: KEEP all that autograd saves, of a compiled layer what its
    `activation_budget` allows; or its inputs only."""

    KEEP = "keep"
    RECOMPUTE = "recompute"

    __hash__ = object.__hash__  # Enum's own is Python, and the search asks for it all the time


class Recovery(Enum):
    """What the death of an optimizer shard costs. IN_PLACE: a moment, its updates are logged in host memory.
    FROM_SAVE: the steps since the last save, as every other death does."""

    IN_PLACE = "in place"
    FROM_SAVE = "from save"


class UpdateOrder(Enum):
    """FORWARD: layer 0 first, once the clip scale is known. BACKWARD: as gradients land."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class LayerPlan:
    """Where a layer's tensors live and what happens to its activations."""

    name: str
    num_parameters: int
    num_trained: int  # of these; the others have neither state nor gradient
    num_muon: int  # of the trained ones: those without a second moment
    num_fragments: int
    weights: Tier
    state: Tier
    gradients: Tier  # where a complete gradient waits for its update
    boundary: Tier | None  # where what enters waits from the forward to the backward; None: it is computed again
    boundary_bytes: int  # of it, of one micro-batch
    activations: ActivationPolicy
    compiled: bool  # its modules run through torch.compile
    # Of a compiled layer: 1.0 keeps what a backward wants, 0.0 the inputs only; the backward computes the rest again.
    activation_budget: float
    updated_by: str  # cpu, gpu, or nobody where nothing is trained
    kept: Tier = Tier.HBM  # where what the forward keeps for the backward waits
    kept_bytes: int = 0  # of it, of one micro-batch, at most; 0 on the device
    kept_later: int = 0  # it comes back with the backward of the layer so many behind (Part.later)

    @property
    def disk_activations(self) -> tuple[int, ...]:
        """Bytes, of one micro-batch, of what enters and of what is kept, where that waits on disk."""
        entering = (self.boundary_bytes,) if self.boundary is Tier.NVME else ()
        return (*entering, self.kept_bytes) if self.kept is Tier.NVME else entering


# Rows of device memory that torch's allocator knows nothing of.
CONTEXT, EXCHANGE = "context", "exchange"


@dataclass(frozen=True)
class ByteCount:
    """One row of the arithmetic."""

    tier: Tier
    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class Plan:
    """Everything that decides placement and order. Sizes in bytes, counts in `num_`."""

    version: Literal[1]
    device: str
    precision: Precision
    order: LoopOrder
    micro_batch_size: int
    num_micro_batches: int
    seq_len: int
    attention: Attention  # of steps in which every row is one document
    packed_attention: Attention  # of the others
    layers: tuple[LayerPlan, ...]
    slots: tuple[SlotSpec, ...]
    # Of layers with something to train: one each in the order of a backward where sums stay on the device, else a ring.
    gradient_slot_bytes: tuple[int, ...]
    leaving_slot_bytes: tuple[int, ...]  # where rounded sums leave from; empty when nothing is rounded
    # Where momenta arrive for Muon's directions, and where these leave from; empty where it trains nothing.
    momentum_slot_bytes: tuple[int, ...]
    direction_slot_bytes: tuple[int, ...]
    gradient_dtype: str  # of what leaves the device: bfloat16 or float32
    sum_dtype: str  # of the gradient slots
    sums: Tier  # where sums over micro-batches wait for the next one
    slab_bytes: int
    direction_slab_bytes: int  # where Muon's directions wait for their update, behind the gradients' slab
    update_order: UpdateOrder
    loss_chunk_tokens: int
    compiled_loss: bool  # a chunk runs through torch.compile
    # The head's gradient of each chunk of the loss goes into the sum over micro-batches; else into a sum of its own.
    chunks_add_to_sums: bool
    num_shards: int
    shard_cut_elements: int
    num_compute_threads: int
    num_shard_threads: int
    recovery: Recovery
    uploads_per_step: int
    saves_frozen: bool  # false: a save leaves out what is frozen
    save_copy_bytes: int  # spare RAM into which a save copies layers that are updated before they are written
    device_copy_bytes: int  # of these, for layers that live on the device
    extent_elements: int  # state that spills is read and written in parts of layers of at most so many
    state_slots: int  # of each shard: such parts, or gradients of parts, that are in host memory at the same time
    hbm_limit_bytes: int | None
    ram_limit_bytes: int
    spill_limit_bytes: int | None  # None: nothing may spill
    rows: tuple[ByteCount, ...]
    captured: bool = False  # forward and backward of a step are one graph that the device has; it launches all at once
    prediction: Prediction | None = None  # of what a step takes
    mlp_chunk_tokens: int = 0  # of a micro-batch that an MLP computes at a time; 0: all of them
    block_parts: int = 1  # into which blocks are divided at most, each a layer of its own (discovery/block_parts.py)
    expert_groups: int = 1  # modules that the experts of a block are at most (model/expert_groups.py)
    disk_io: DiskIo = DiskIo.POSIX  # by whom what is on disk is read and written
    weight_windows: int = 0  # host memory of a layer's working copy each, which those on disk pass through
    weight_read_bytes: int = 0  # of working copies on disk, read for the uploads of a step
    disk_packed: bool = False  # blocks of floats take fewer bytes there than they have (storage/packed_store.py)
    num_windows: int = 0  # through which activations go to the disk and come back
    window_bytes: int = 0  # of each
    windows: Tier = Tier.HOST  # where these are; hbm: what reads and writes the file moves memory of the device
    shard_homes: tuple[Home, ...] = ()  # CPUs and memory of each shard; empty: one node, nothing is put on any
    gpu_homes: tuple[GpuHome, ...] = ()  # of a worker, by the GPU that it gets; empty: one node, or no GPU's is known
    num_gpus: int = 1  # each computes so many micro-batches of a step, and has what is said of the device to itself
    num_hosts: int = 1  # among which these are divided; each has a share of every layer, and such shards of its own
    gathers_slots: bool = False  # each GPU uploads its part of a layer alone, and has the rest from the others

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        return _dtype(self.gradient_dtype)

    @cached_property
    def accumulation_dtype(self) -> torch.dtype:
        return _dtype(self.sum_dtype)

    @property
    def host_gpus(self) -> int:
        """GPUs of each host."""
        return self.num_gpus // self.num_hosts

    @property
    def num_parts(self) -> int:
        """Of a save: one of each shard of each host, and one of the layers on the device."""
        return self.num_hosts * self.num_shards + 1

    @property
    def slab_itemsize(self) -> int:
        """Bytes of an element of the largest thing that waits in the slab."""
        return (self.accumulation_dtype if self.sums is Tier.HOST else self.wire_dtype).itemsize

    @property
    def num_fragments(self) -> int:
        return max(layer.num_fragments for layer in self.layers)

    @cached_property
    def layer_order(self) -> tuple[int, ...]:
        """The order in which an update by the shards visits layers: those on the host of which something is trained."""
        updated = [i for i, layer in enumerate(self.layers) if layer.updated_by == "cpu"]
        return tuple(updated if self.update_order is UpdateOrder.FORWARD else reversed(updated))

    @property
    def updated_layers(self) -> tuple[frozenset[int], ...]:
        """By each of those who signal what they have updated: the shards, and the device where layers live there."""
        by = {who: frozenset(i for i, x in enumerate(self.layers) if x.updated_by == who) for who in ("cpu", "gpu")}
        return (*[by["cpu"]] * self.num_shards, *([by["gpu"]] if self.hbm_layers else []))

    @cached_property
    def hbm_layers(self) -> frozenset[int]:
        """Those that live on the device: working copy, state and gradient."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer.weights is Tier.HBM)

    @cached_property
    def host_layers(self) -> frozenset[int]:
        """The others, which stream."""
        return frozenset(range(len(self.layers))) - self.hbm_layers

    def sums_whole(self, layer: int) -> bool:
        """Whether all ranks get a layer's whole sum: each updates it itself, or keeps whole matrices, whose parts do
        not lie in the order of ranks, as those of a reduce-scatter must."""
        return layer in self.hbm_layers or self.layers[layer].num_muon > 0

    @cached_property
    def spilled_layers(self) -> frozenset[int]:
        """Those whose state is on disk."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer.state is Tier.NVME)

    @cached_property
    def weights_on_disk(self) -> frozenset[int]:
        """Those whose working copy is on disk, where their state is."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer.weights is Tier.NVME)

    @cached_property
    def weights_on_host(self) -> frozenset[int]:
        """Those whose working copy stays in host memory."""
        return self.host_layers - self.weights_on_disk

    @property
    def activations_io(self) -> DiskIo:
        """By whom activations on disk are read and written. Memory of a GPU is in kvikio's reach alone; that of the CPU
        device in everybody's."""
        is_direct = self.windows is Tier.HBM and self.device == "cuda"
        return DiskIo.KVIKIO if is_direct else self.disk_io

    @property
    def uses_disk(self) -> bool:
        """Whether state or gradients of some layer are on disk. Working copies are there with state alone."""
        return bool(self.spilled_layers or self.stored_layers)

    @cached_property
    def waiting_layers(self) -> frozenset[int]:
        """Those with something to train whose complete gradient waits on the device."""
        waits = (i for i, layer in enumerate(self.layers) if layer.num_trained and layer.gradients is Tier.HBM)
        return frozenset(waits)

    @cached_property
    def departing_layers(self) -> tuple[int, ...]:
        """Of these the ones that the shards update, in the order in which their gradients leave: after the backward."""
        waiting = self.waiting_layers
        return tuple(i for i in self.layer_order if i in waiting)

    @cached_property
    def stored_layers(self) -> tuple[int, ...]:
        """Those whose complete gradient waits on disk, in the order of a backward."""
        return tuple(i for i in reversed(self.layer_order) if self.layers[i].gradients is Tier.NVME)

    @cached_property
    def passing_layers(self) -> frozenset[int]:
        """Those whose complete gradient does not stay in the slab until all are there."""
        if self.update_order is UpdateOrder.BACKWARD:
            return self.host_layers
        return frozenset((*self.departing_layers, *self.stored_layers))

    @property
    def repeats_steps(self) -> bool:
        """Whether another GPU worker may make a step once more: all state is with the shards, and of a step that is not
        committed nobody has read anything."""
        on_host = not self.hbm_layers and not self.stored_layers and not self.weights_on_disk
        return on_host and self.update_order is UpdateOrder.FORWARD

    @property
    def gradients_are_brief(self) -> bool:
        """Whether a gradient that waits on the device comes up in the last visit to its layer; else it has a place
        there for good."""
        one_visit = self.num_micro_batches == 1 or self.order is LoopOrder.LAYERS_OUTER
        # What a captured step writes stays where it was when that was captured.
        return (one_visit or self.sums is Tier.HOST) and not self.captured

    @cached_property
    def paired_layers(self) -> range:
        """Blocks of which a micro-batch's gradient waits for that of the next one, where that comes next: added to the
        sum together they read and write it half as often."""
        several = self.num_micro_batches > 1 and self.order is LoopOrder.LAYERS_OUTER
        return range(1, len(self.layers) - 1) if several else range(0)

    @property
    def never_in_slab(self) -> frozenset[int]:
        """Layers of which nothing ever waits on the host."""
        return frozenset() if self.sums is Tier.HOST else self.hbm_layers

    @property
    def num_live_micro_batches(self) -> int:
        """Whose activations exist at the same time."""
        return self.num_micro_batches if self.order is LoopOrder.LAYERS_OUTER else 1

    @property
    def batch_size(self) -> int:
        """Sequences of an update, over all GPUs."""
        return self.micro_batch_size * self.num_micro_batches * self.num_gpus

    @property
    def num_mlp_chunks(self) -> int:
        """Of a micro-batch."""
        return -(-self.micro_batch_size * self.seq_len // self.mlp_chunk_tokens) if self.mlp_chunk_tokens else 1

    @property
    def boundary_bytes(self) -> int:
        """Host memory for what enters layers."""
        on_host = (layer.boundary_bytes for layer in self.layers if layer.boundary is Tier.HOST)
        return self.num_live_micro_batches * sum(on_host)

    @property
    def kept_bytes(self) -> int:
        """Host memory for what layers keep for their backward."""
        on_host = (layer.kept_bytes for layer in self.layers if layer.kept is Tier.HOST)
        return self.num_live_micro_batches * sum(on_host)

    @property
    def host_activation_bytes(self) -> int:
        """Host memory for activations."""
        return self.boundary_bytes + self.kept_bytes

    @cached_property
    def disk_activations(self) -> tuple[int, ...]:
        """Bytes of all activations of a GPU that are on disk at the same time, each of one layer and micro-batch."""
        return self.num_live_micro_batches * tuple(b for layer in self.layers for b in layer.disk_activations)

    @property
    def activation_file_bytes(self) -> int:
        """Of one GPU, on disk: whole pages."""
        return sum(map(aligned, self.disk_activations))

    @property
    def activation_files_bytes(self) -> int:
        """Of all GPUs of a host, each of which has a file of its own."""
        return self.host_gpus * self.activation_file_bytes

    @property
    def num_sweeps(self) -> int:
        """Forwards through all layers in a step, each with as many micro-batches as are live."""
        return self.num_micro_batches // self.num_live_micro_batches

    @property
    def written_bytes(self) -> int:
        """To the disk of a host in a step, and read from it as much."""
        return self.total_bytes(Tier.NVME) + (self.num_sweeps - 1) * self.activation_files_bytes

    @property
    def moves_activations(self) -> bool:
        """Whether what enters some layer, or what it keeps, does not wait on the device."""
        return any(layer.boundary is not Tier.HBM or layer.kept is not Tier.HBM for layer in self.layers)

    @cached_property
    def replayed_layers(self) -> frozenset[int]:
        """Whose output is computed again for the backward of the layer behind."""
        return frozenset(i - 1 for i, layer in enumerate(self.layers) if layer.boundary is None)

    @cached_property
    def kept_until(self) -> tuple[tuple[int, ...], ...]:
        """Of each layer those with what is kept for its backward: itself, but for parts of blocks."""
        found: list[list[int]] = [[] for _ in self.layers]
        for i, layer in reversed(list(enumerate(self.layers))):
            found[i + layer.kept_later].append(i)
        return tuple(map(tuple, found))

    def visits(self, lowest_trained: int) -> tuple[Visit, ...]:
        """Of a step."""
        return visits(len(self.layers), self.num_micro_batches, self.order, lowest_trained, self.replayed_layers)

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_trained(self) -> int:
        return sum(layer.num_trained for layer in self.layers)

    @property
    def num_muon(self) -> int:
        return sum(layer.num_muon for layer in self.layers)

    @property
    def save_bytes(self) -> int:
        """Of one save, without its manifest: 12 bytes per trained parameter (8 with narrow moments), 8 where Muon
        trains it, the working copy of the others."""
        return self.updated_bytes + (self.frozen_bytes if self.saves_frozen else 0)

    @property
    def frozen_bytes(self) -> int:
        """Of the working copy of what is frozen."""
        return self.precision.working_dtype.itemsize * (self.num_parameters - self.num_trained)

    @property
    def updated_bytes(self) -> int:
        """What an update changes."""
        return self.precision.element_bytes * self.num_trained - SECOND_MOMENT_BYTES * self.num_muon

    @property
    def update_deadline_s(self) -> float:
        """How long an update may take at most: a save may hold it up for as long as the disk needs."""
        return transfer_deadline_s(self.save_bytes)

    def total_bytes(self, tier: Tier) -> int:
        return sum(row.num_bytes for row in self.rows if row.tier is tier)

    def row_bytes(self, tier: Tier, *names: str) -> int:
        """Of the rows with these names; 0 where there are none."""
        return sum(row.num_bytes for row in self.rows if row.tier is tier and row.name in names)

    def to_json(self) -> str:
        return TypeAdapter(Plan).dump_json(self, indent=1).decode() + "\n"

    @cached_property
    def sha256(self) -> str:
        """Of its file: of all that it decides and predicts, and of the rates that it was made with."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises pydantic.ValidationError for text that is no plan of this version."""
        plan = TypeAdapter(Plan).validate_json(text)
        # Those of several hosts always did, before the plan said so.
        return replace(plan, gathers_slots=True) if plan.num_hosts > 1 and not plan.gathers_slots else plan


def _dtype(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
