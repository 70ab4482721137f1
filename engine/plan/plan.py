"""Defines the plan: which tier everything lives on, how a step runs, and how many bytes that takes.

The engine obeys the plan and decides no placement itself. The schema is versioned and described in
docs/plan_format.md. `plan.json` in a run directory is `Plan.to_json()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from megatrain_ray.engine.device.deadlines import transfer_deadline_s
from megatrain_ray.engine.layout.precision import SECOND_MOMENT_BYTES, Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan_groups import (
    ComputeSettings,
    DiskSettings,
    GradientSettings,
    HostSettings,
    MemoryLimits,
    SaveSettings,
    ShardSettings,
    SlotSizes,
    StepShape,
    UpdateOrder,
)
from megatrain_ray.engine.plan.plan_json import as_version_2
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.plan.schedule import LoopOrder, Visit, visits
from megatrain_ray.io.storage.blob_store import aligned


class ActivationPolicy(Enum):
    """Says which activations of a layer are saved from its forward for its backward.

    KEEP: all that autograd saves; of a compiled layer, what its `activation_budget` allows.
    RECOMPUTE: the layer's inputs only.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"

    __hash__ = object.__hash__  # Enum.__hash__ is Python code, and the plan search hashes members all the time


@dataclass(frozen=True)
class LayerPlan:
    """Says where a layer's tensors live and what happens to its activations."""

    name: str
    num_parameters: int
    num_trained: int  # trained parameters among these; the others have neither optimizer state nor gradient
    num_muon: int  # trained parameters that Muon trains: they have no second moment
    num_fragments: int
    weights: Tier
    state: Tier
    gradients: Tier  # where a complete gradient waits for its update
    boundary: Tier | None  # where the layer's input waits from the forward to the backward; None: it is recomputed
    boundary_bytes: int  # size of that input for one micro-batch
    activations: ActivationPolicy
    compiled: bool  # its modules run through torch.compile
    # Share of a compiled layer's activations that is kept. 1.0: all that the backward needs; 0.0: the inputs only. The
    # backward recomputes the rest.
    activation_budget: float
    updated_by: str  # cpu (the shards), gpu (the device), or nobody if nothing is trained
    kept: Tier = Tier.HBM  # where the activations that the forward keeps for the backward wait
    kept_bytes: int = 0  # upper bound on their bytes for one micro-batch; 0 if they stay on the device
    num_frozen_fp32: int = 0  # parameters that are not trained, and that the model reads in FP32 beside bf16
    kept_later: int = 0  # they are reloaded for the backward of the layer this many further on (Part.later)

    @property
    def disk_activations(self) -> tuple[int, ...]:
        """Return the bytes of each activation of one micro-batch that waits on disk: the input, then what is kept."""
        entering = (self.boundary_bytes,) if self.boundary is Tier.NVME else ()
        return (*entering, self.kept_bytes) if self.kept is Tier.NVME else entering


FP32_BYTES = 4  # of an element

# Names of the rows of device memory that torch's allocator does not manage, and of what it holds beside tensors.
CONTEXT, EXCHANGE = "context", "exchange"
ALLOCATOR = "allocator"
BESIDE_TENSORS = CONTEXT, EXCHANGE, ALLOCATOR


@dataclass(frozen=True)
class MemoryItem:
    """Holds one row of the memory arithmetic: what some item takes in a tier, and how that was computed."""

    tier: Tier
    name: str
    num_bytes: Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
    formula: str


@dataclass(frozen=True)
class Plan:
    """Holds all decisions on placement and order. Sizes are in bytes; names of counts begin with `num_`.

    What is said of the device holds for each GPU, and what is said of the host for each host.

    memory_items: the arithmetic of every tier.
    prediction: expected cost of a step.
    """

    version: Literal[2]
    device: str
    precision: Precision
    step: StepShape
    compute: ComputeSettings
    layers: tuple[LayerPlan, ...]
    slots: SlotSizes
    gradients: GradientSettings
    disk: DiskSettings
    shards: ShardSettings
    hosts: HostSettings
    saves: SaveSettings
    limits: MemoryLimits
    memory_items: tuple[MemoryItem, ...] = ()
    prediction: Prediction | None = None

    @property
    def num_parts(self) -> int:
        """Return the number of parts of a save: one per shard of each host, and one for the layers on the device."""
        return self.hosts.num_hosts * self.shards.num_shards + 1

    @property
    def num_fragments(self) -> int:
        return max(layer.num_fragments for layer in self.layers)

    @cached_property
    def layer_order(self) -> tuple[int, ...]:
        """Return the layers that the shards update, in that order: layers on the host with something to train."""
        updated = [i for i, layer in enumerate(self.layers) if layer.updated_by == "cpu"]
        late = len(updated) if self.step.update_order is UpdateOrder.FORWARD else self.step.num_updated_late
        return (*reversed(updated[late:]), *updated[:late])

    @property
    def updated_layers(self) -> tuple[frozenset[int], ...]:
        """Return the layers that each updater signals as updated: one set per shard, then one if layers are in HBM."""
        by = {who: frozenset(i for i, x in enumerate(self.layers) if x.updated_by == who) for who in ("cpu", "gpu")}
        return (*[by["cpu"]] * self.shards.num_shards, *([by["gpu"]] if self.hbm_layers else []))

    @cached_property
    def hbm_layers(self) -> frozenset[int]:
        """Return the layers that live on the device with working copy, state and gradient."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer.weights is Tier.HBM)

    @cached_property
    def host_layers(self) -> frozenset[int]:
        """Return the layers that stream: all except those that live on the device."""
        return frozenset(range(len(self.layers))) - self.hbm_layers

    def sums_whole(self, layer: int) -> bool:
        """Return whether every rank gets a layer's whole gradient sum, instead of its part by a reduce-scatter.

        This holds for layers in HBM, which each rank updates itself. It also holds for layers with Muon: each rank
        keeps whole matrices, and these parts do not lie in the order of ranks, as a reduce-scatter requires.
        """
        return layer in self.hbm_layers or self.layers[layer].num_muon > 0

    @cached_property
    def spilled_layers(self) -> frozenset[int]:
        """Return the layers whose optimizer state is on disk."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer.state is Tier.NVME)

    @cached_property
    def weights_on_disk(self) -> frozenset[int]:
        """Return the layers whose working copy is on disk. Their state is there, too."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer.weights is Tier.NVME)

    @cached_property
    def weights_on_host(self) -> frozenset[int]:
        """Return the layers whose working copy stays in host memory."""
        return self.host_layers - self.weights_on_disk

    @property
    def uses_disk(self) -> bool:
        """Return whether state or gradients of some layer are on disk. Working copies are there only with state."""
        return bool(self.spilled_layers or self.gradients_on_disk)

    @cached_property
    def gradients_on_device(self) -> frozenset[int]:
        """Return the layers with something to train whose complete gradient waits on the device."""
        waits = (i for i, layer in enumerate(self.layers) if layer.num_trained and layer.gradients is Tier.HBM)
        return frozenset(waits)

    @cached_property
    def deferred_offload_layers(self) -> tuple[int, ...]:
        """Return those of `gradients_on_device` that the shards update.

        They are in the order in which their gradients leave the device, which is after the backward.
        """
        waiting = self.gradients_on_device
        return tuple(i for i in self.layer_order if i in waiting)

    @cached_property
    def gradients_on_disk(self) -> tuple[int, ...]:
        """Return the layers whose complete gradient waits on disk, in the order of a backward."""
        return tuple(i for i in reversed(self.layer_order) if self.layers[i].gradients is Tier.NVME)

    @cached_property
    def slab_transit_layers(self) -> frozenset[int]:
        """Return the layers whose complete gradient does not stay in the slab until all gradients are complete."""
        if self.step.update_order is UpdateOrder.BACKWARD:
            return self.host_layers
        return frozenset((*self.deferred_offload_layers, *self.gradients_on_disk))

    @property
    def repeats_steps(self) -> bool:
        """Return whether a replacement GPU worker can repeat a step that was interrupted.

        It can if the shards hold all state, and nothing has read results of a step that is not committed.
        """
        on_host = not self.hbm_layers and not self.gradients_on_disk and not self.weights_on_disk
        return on_host and self.step.update_order is UpdateOrder.FORWARD

    @property
    def gradients_allocated_on_demand(self) -> bool:
        """Return whether a gradient that waits on the device is allocated only in the last visit to its layer.

        Otherwise its memory is allocated once and kept.
        """
        one_visit = self.step.num_micro_batches == 1 or self.step.order is LoopOrder.LAYERS_OUTER
        # A captured step writes to the addresses that it was captured with, so they must stay allocated.
        return (one_visit or self.gradients.sums is Tier.HOST) and not self.step.captured

    @cached_property
    def paired_layers(self) -> range:
        """Return the blocks whose gradients of two micro-batches are added to the sum together.

        This reads and writes the sum half as often. The second micro-batch must come directly after the first, so there
        are none unless layers are outermost and there are several micro-batches.
        """
        several = self.step.num_micro_batches > 1 and self.step.order is LoopOrder.LAYERS_OUTER
        return range(1, len(self.layers) - 1) if several else range(0)

    @property
    def settles(self) -> bool:
        """Return whether tensors that outlive a layer's work are copied out of its memory (settle.py).

        A captured step always uses the same memory.
        """
        several = self.step.num_micro_batches > 1 and self.step.order is LoopOrder.LAYERS_OUTER
        return several and not self.step.captured

    @property
    def never_in_slab(self) -> frozenset[int]:
        """Return the layers that never need memory of the slab."""
        return frozenset() if self.gradients.sums is Tier.HOST else self.hbm_layers

    @property
    def batch_size(self) -> int:
        """Return the number of sequences of an update, over all GPUs."""
        return self.step.micro_batch_size * self.step.num_micro_batches * self.hosts.num_gpus

    @property
    def number_formats(self) -> str:
        """Return the number formats of the compute, and of moments if they are not FP32."""
        return f"{self.precision.value}{', products of layers in fp8' if self.compute.fp8 else ''}"

    @property
    def num_mlp_chunks(self) -> int:
        """Return the number of chunks in which an MLP computes a micro-batch."""
        tokens = self.compute.mlp_chunk_tokens
        return -(-self.step.micro_batch_size * self.step.seq_len // tokens) if tokens else 1

    @property
    def host_boundary_bytes(self) -> int:
        """Return the bytes of host memory for the inputs of layers."""
        on_host = (layer.boundary_bytes for layer in self.layers if layer.boundary is Tier.HOST)
        return self.step.num_live_micro_batches * sum(on_host)

    @property
    def host_kept_bytes(self) -> int:
        """Return the bytes of host memory for the activations that layers keep for their backward."""
        on_host = (layer.kept_bytes for layer in self.layers if layer.kept is Tier.HOST)
        return self.step.num_live_micro_batches * sum(on_host)

    @property
    def host_activation_bytes(self) -> int:
        """Return the bytes of host memory for all activations."""
        return self.host_boundary_bytes + self.host_kept_bytes

    @cached_property
    def disk_activations(self) -> tuple[int, ...]:
        """Return the bytes of each activation of a GPU that is on disk, of all that are there at the same time.

        There is one entry per kind of activation, layer and live micro-batch.
        """
        return self.step.num_live_micro_batches * tuple(b for layer in self.layers for b in layer.disk_activations)

    @property
    def activation_file_bytes(self) -> int:
        """Return the bytes of one GPU's file of activations: each activation takes whole pages."""
        return sum(map(aligned, self.disk_activations))

    @property
    def activation_disk_bytes(self) -> int:
        """Return the bytes of disk for the activations of a host, whose GPUs have a file each."""
        return self.hosts.gpus_per_host * self.activation_file_bytes

    @property
    def written_bytes(self) -> int:
        """Return the bytes written to a host's disk in a step. As many are read, besides `weight_read_bytes`."""
        return self.total_bytes(Tier.NVME) + (self.step.num_sweeps - 1) * self.activation_disk_bytes

    @property
    def moves_activations(self) -> bool:
        """Return whether some layer's input, or what it keeps, does not wait on the device."""
        return any(layer.boundary is not Tier.HBM or layer.kept is not Tier.HBM for layer in self.layers)

    @cached_property
    def replayed_layers(self) -> frozenset[int]:
        """Return the layers whose forward runs again before the backward of the next layer, to recompute its input."""
        return frozenset(i - 1 for i, layer in enumerate(self.layers) if layer.boundary is None)

    @cached_property
    def kept_until(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each layer, the layers whose kept activations its backward needs.

        That is the layer itself, except for parts of blocks.
        """
        found: list[list[int]] = [[] for _ in self.layers]
        for i, layer in reversed(list(enumerate(self.layers))):
            found[i + layer.kept_later].append(i)
        return tuple(map(tuple, found))

    def visits(self, without_backward: Set[int], num_micro_batches: int | None = None) -> tuple[Visit, ...]:
        """Return the visits of a step.

        without_backward: layers that no gradient reaches (ModelStructure.without_backward).
        num_micro_batches: of a step that has fewer than planned; None: as many as planned.
        """
        count = num_micro_batches or self.step.num_micro_batches
        return visits(len(self.layers), count, self.step.order, without_backward, self.replayed_layers)

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
        """Return the bytes of one save without its manifest.

        A trained parameter takes 12 bytes (8 with narrow moments), or 8 if Muon trains it. A frozen one takes the bytes
        of its working copy, or 4 if the model reads it in FP32, if saves include it.
        """
        return self.updated_bytes + (self.frozen_bytes if self.saves.includes_frozen else 0)

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of the working copy, or of the FP32 values, of all frozen parameters."""
        itemsize, num_fp32 = self.precision.working_dtype.itemsize, sum(layer.num_frozen_fp32 for layer in self.layers)
        return itemsize * (self.num_parameters - self.num_trained) + (FP32_BYTES - itemsize) * num_fp32

    @property
    def updated_bytes(self) -> int:
        """Return the bytes that an update changes: working copy and state of all trained parameters."""
        return self.precision.element_bytes * self.num_trained - SECOND_MOMENT_BYTES * self.num_muon

    @property
    def update_deadline_s(self) -> float:
        """Return the seconds after which an update has failed. A save may delay it for as long as the disk needs."""
        return transfer_deadline_s(self.save_bytes)

    def total_bytes(self, tier: Tier) -> int:
        return sum(item.num_bytes for item in self.memory_items if item.tier is tier)

    def item_bytes(self, tier: Tier, *names: str) -> int:
        """Return the bytes of the tier's rows with these names; 0 if there are none."""
        return sum(item.num_bytes for item in self.memory_items if item.tier is tier and item.name in names)

    def to_json(self) -> str:
        return TypeAdapter(Plan).dump_json(self, indent=1).decode() + "\n"

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the plan's file, which holds its decisions, its prediction and the rates it used."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parse a plan of this version or of version 1. Raises pydantic.ValidationError for any other text."""
        return TypeAdapter(Plan).validate_json(as_version_2(text))
