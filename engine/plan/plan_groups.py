"""Defines the groups of a plan's settings: step, compute, slots, gradients, disk, shards, hosts, saves and limits.

Sizes are in bytes; names of counts begin with `num_`. A default stands for "not used".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
from pydantic import PlainSerializer, PlainValidator

from megatrain_ray.engine.device.device import CONTEXT_BYTES
from megatrain_ray.engine.device.numa_homes import GpuHome, Home
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.io.storage.disk_io import DiskIo


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: object) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float32):
        if dtype_name(dtype) == name:
            return dtype
    raise ValueError(f"no type of gradients: {name}")


GradientDtype = Annotated[
    torch.dtype,
    PlainValidator(_dtype),
    PlainSerializer(dtype_name),
]


class UpdateOrder(Enum):
    """Says in which order and when the optimizer updates layers.

    FORWARD: layer 0 first, once the clip scale is known.
    BACKWARD: the last layer first, each as soon as its gradient arrives.
    """

    FORWARD = "forward"
    BACKWARD = "backward"


class Recovery(Enum):
    """Says what the death of an optimizer shard costs.

    IN_PLACE: a moment, because its updates are logged in host memory.
    FROM_SAVE: the steps since the last save, as every other death does.
    """

    IN_PLACE = "in place"
    FROM_SAVE = "from save"


@dataclass(frozen=True)
class StepShape:
    """Describes the batch of a step, and the order in which a step visits and updates layers."""

    order: LoopOrder
    update_order: UpdateOrder
    micro_batch_size: int
    num_micro_batches: int  # of each GPU
    seq_len: int
    captured: bool = False  # whether forward and backward are one graph, which the device launches at once
    # In backward order: of the layers that shards update, so many first ones come after all others, in forward order,
    # in which the next forward needs them.
    num_updated_late: int = 0

    @property
    def num_live_micro_batches(self) -> int:
        """Return the number of micro-batches whose activations exist at the same time."""
        return self.num_micro_batches if self.order is LoopOrder.LAYERS_OUTER else 1

    @property
    def num_sweeps(self) -> int:
        """Return the number of forwards through all layers in a step, each with all live micro-batches."""
        return self.num_micro_batches // self.num_live_micro_batches


@dataclass(frozen=True)
class ComputeSettings:
    """Says how the device computes layers and the loss."""

    attention: Attention  # for steps in which every row is one document
    packed_attention: Attention  # for steps in which a row holds several documents
    loss_chunk_tokens: int  # tokens whose logits exist at the same time
    compiled_loss: bool  # whether a chunk of the loss runs through torch.compile
    # Whether the head's gradient of each chunk of the loss is added to the sum over micro-batches. Else the chunks have
    # a sum of their own.
    chunks_add_to_sums: bool
    num_threads: int  # torch threads of the compute thread on the CPU device
    mlp_chunk_tokens: int = 0  # tokens of a micro-batch that an MLP computes at a time; 0: all of them
    block_parts: int = 1  # largest number of layers that a block is divided into (discovery/block_parts.py)
    expert_groups: int = 1  # largest number of modules that hold the experts of a block (model/expert_groups.py)
    fp8: bool = False  # whether matrices of blocks are multiplied in FP8 (model/fp8_products.py)

    @property
    def score_chunk_tokens(self) -> int:
        """Return the tokens whose logits exist at the same time where these are scored without a gradient.

        That is never compiled, so logits exist in FP32, too: as many bytes are half as many of a compiled loss.
        """
        return -(-self.loss_chunk_tokens // 2) if self.compiled_loss else self.loss_chunk_tokens


@dataclass(frozen=True)
class SlotSpec:
    """Describes a slot. It takes fragments of its group that are no larger than `num_bytes`."""

    group: str
    num_bytes: int


@dataclass(frozen=True)
class SlotSizes:
    """Holds the device regions that weights, gradients and Muon's matrices stream through."""

    weights: tuple[SlotSpec, ...]
    # Regions for gradient sums of layers with something to train. If the unfinished sums of all layers stay on the
    # device: one region per layer, in backward order. Else: a ring that layers use in turn.
    gradient_bytes: tuple[int, ...]
    rounded_bytes: tuple[int, ...]  # regions that rounded sums are offloaded from; empty if nothing is rounded
    # Regions where momenta arrive for Muon, and regions that the orthogonalized momenta (directions) are offloaded
    # from. Empty if Muon trains nothing.
    momentum_bytes: tuple[int, ...]
    direction_bytes: tuple[int, ...]
    gathered: bool = False  # whether each GPU uploads only its part of a layer and gets the rest from the others
    num_uploads: int = 0  # loads of fragments in one step


@dataclass(frozen=True)
class GradientSettings:
    """Says in which types gradients are summed and offloaded, and how much host memory they pass through."""

    offload_dtype: GradientDtype  # type of gradients that leave the device
    accumulate_dtype: GradientDtype  # type of the sums in the gradient slots
    sums: Tier  # where unfinished sums over micro-batches wait for the next micro-batch
    slab_bytes: int
    direction_slab_bytes: int  # where Muon's directions wait for their update; lies after the gradients' slab

    @property
    def slab_itemsize(self) -> int:
        """Return the bytes of an element of the widest type in the slab: sums if they wait there, else gradients."""
        return (self.accumulate_dtype if self.sums is Tier.HOST else self.offload_dtype).itemsize


@dataclass(frozen=True)
class DiskSettings:
    """Says how data on disk is read and written, and through which buffers."""

    io: DiskIo = DiskIo.POSIX  # whether files are read and written by POSIX calls or kvikio
    packed: bool = False  # whether blocks of floats are compressed on disk (storage/packed_store.py)
    extent_elements: int = 0  # optimizer state is read and written in parts of layers of at most this many elements
    num_state_slots: int = 0  # per shard: how many such parts, or gradients of parts, are in host memory at once
    num_upload_buffers: int = 0  # host buffers, each for one layer, that working copies on disk are uploaded through
    weight_read_bytes: int = 0  # bytes of working copies on disk that are read for the uploads of a step
    num_staging_buffers: int = 0  # host buffers that activations pass through, both ways
    staging_buffer_bytes: int = 0  # of each


@dataclass(frozen=True)
class ShardSettings:
    """Describes the optimizer shards of each host."""

    num_shards: int
    cut_elements: int  # layers are divided among shards at multiples of this many elements
    num_threads: int  # of each
    recovery: Recovery
    homes: tuple[Home, ...] = ()  # CPUs and memory of each shard; empty: one NUMA node, nothing is bound to one


@dataclass(frozen=True)
class HostSettings:
    """Describes the hosts and GPUs that share a step."""

    num_hosts: int = 1  # each has a share of every layer
    num_gpus: int = 1  # of all hosts together; each computes all micro-batches of `StepShape`
    gpu_homes: tuple[GpuHome, ...] = ()  # home of a worker, by its GPU; empty: one NUMA node, or no GPU's is known

    @property
    def gpus_per_host(self) -> int:
        return self.num_gpus // self.num_hosts


@dataclass(frozen=True)
class SaveSettings:
    """Says what a save holds, and how much RAM it may copy to."""

    includes_frozen: bool  # whether frozen parameters are saved too
    copy_bytes: int = 0  # spare RAM into which a save copies layers that are updated before they are written
    device_copy_bytes: int = 0  # the part of it for layers that live on the device


@dataclass(frozen=True)
class MemoryLimits:
    """Holds the bytes of each tier that the plan must fit."""

    hbm_bytes: int | None  # None: device memory is host memory, and nothing else limits it
    ram_bytes: int
    spill_bytes: int | None  # None: nothing may spill
    context_bytes: int = CONTEXT_BYTES  # what a process takes of a GPU's memory besides its tensors
