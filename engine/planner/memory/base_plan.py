"""Makes the part of a candidate's plan that depends neither on activations nor on what is on disk.

This part is settings, slots for weights, regions for gradients, and the slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch

from megatrain_ray.engine.device.device import CONTEXT_BYTES
from megatrain_ray.engine.device.numa_homes import fewest_cpus, gpu_homes, shard_homes
from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, NODE_CUT_ELEMENTS, ElementRange
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.optimizer.muon import largest_part
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import (
    ComputeSettings,
    DiskSettings,
    GradientSettings,
    HostSettings,
    MemoryLimits,
    Recovery,
    SaveSettings,
    ShardSettings,
    SlotSizes,
    SlotSpec,
    StepShape,
    UpdateOrder,
)
from megatrain_ray.engine.plan.residency import group_of
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.io.storage.disk_io import DiskIo

# Reserve for kernels that are compiled for a model, and libraries that the measurement of a machine does not use. On an
# H100 the first compiled MLP took 64 MiB.
KERNEL_BYTES = 64 << 20


def base_plan(
    structure: ModelStructure, layout: ModelLayout, machine: Machine, request: Request, candidate: Candidate,
    gradients: GradientPlacement,
) -> Plan:  # fmt: skip
    """Return a candidate's plan without what depends on activations or on the disk.

    It lacks layers, rows, the tokens of a chunk of the loss, and everything that follows from what is on disk.
    """
    r, c, m = request, candidate, machine
    num_shards = m.shards(r.num_shards)
    homes = shard_homes(m.nodes, num_shards)
    return Plan(
        version=2,
        device=m.device,
        precision=r.precision,
        layers=(),
        step=StepShape(
            order=c.order,
            update_order=UpdateOrder.FORWARD if r.clip else UpdateOrder.BACKWARD,
            micro_batch_size=r.micro_batch_size,
            num_micro_batches=r.num_micro_batches,
            seq_len=r.seq_len,
            captured=bool(r.captured),
            num_updated_late=c.num_updated_late,
        ),
        compute=ComputeSettings(
            attention=r.attention,
            packed_attention=r.packed_attention,
            loss_chunk_tokens=0,
            compiled_loss=r.compiled,
            chunks_add_to_sums=r.sums_several and bool(structure.loss_parameters) and not structure.is_reward,
            num_threads=max(1, m.num_cpus * r.num_hosts // r.num_gpus),
            mlp_chunk_tokens=r.mlp_chunk_tokens,
            block_parts=max(map(len, structure.blocks)),
            expert_groups=structure.expert_groups,
            fp8=bool(structure.fp8),
        ),
        slots=SlotSizes(
            weights=_slots(structure, layout, request, candidate),
            gradient_bytes=gradients.slot_bytes,
            rounded_bytes=gradients.leaving_slot_bytes,
            momentum_bytes=gradients.muon_slot_bytes(torch.float32.itemsize),
            direction_bytes=gradients.muon_slot_bytes(DIRECTION_BYTES),
            gathered=r.num_hosts > 1 or bool(r.gathers_slots),
        ),
        gradients=GradientSettings(
            offload_dtype=gradients.wire,
            accumulate_dtype=gradients.sums,
            sums=c.sums,
            slab_bytes=gradients.slab_bytes,
            direction_slab_bytes=in_flight(layout.direction_bytes),
        ),
        disk=DiskSettings(io=m.spill.way.io if m.spill else DiskIo.POSIX, packed=bool(m.spill and m.spill.way.packed)),
        shards=ShardSettings(
            num_shards=num_shards,
            cut_elements=NODE_CUT_ELEMENTS if m.num_nodes > 1 else CUT_ELEMENTS,
            num_threads=fewest_cpus(homes) if homes else max(1, m.num_cpus // num_shards),
            recovery=Recovery.IN_PLACE,  # all state is updated in host memory, and updates are logged there
            homes=homes,
        ),
        hosts=HostSettings(r.num_hosts, r.num_gpus, gpu_homes(m.nodes, m.gpus)),
        saves=SaveSettings(includes_frozen=r.saves_frozen),
        limits=MemoryLimits(m.hbm_bytes, m.ram_bytes, m.spill.limit_bytes if m.spill else None, _context_bytes(m)),
    )


def _context_bytes(machine: Machine) -> int:
    """Return the device memory that a GPU worker takes besides its tensors: as measured, with a reserve, or a guess."""
    measured = machine.rates.context_bytes
    return CONTEXT_BYTES if measured is None else measured + KERNEL_BYTES


def _slots(
    structure: ModelStructure, layout: ModelLayout, request: Request, candidate: Candidate
) -> tuple[SlotSpec, ...]:
    item = request.precision.working_dtype.itemsize
    resident, last = candidate.hbm_layers, len(layout.layers) - 1
    is_block = [layer.kind is LayerKind.BLOCK for layer in structure.layers]
    streamed = [x for i, x in enumerate(layout.layers) if i not in resident and is_block[i]]
    fragments = zip_longest(*(layer.fragments for layer in streamed), fillvalue=ElementRange(0, 0))
    largest = [max(span.size for span in spans) * item for spans in fragments]
    # A visit to a layer needs several blocks in slots at once: the layer itself and those it shares weights with.
    shared = [sources for sources in layout.sources if len(sources) > 1]
    at_once = (sum(is_block[i] for i in sources if i not in resident) for sources in shared)
    together = max([min(1, len(streamed)), *at_once])
    one_block = [SlotSpec(group_of(LayerKind.BLOCK, f), num_bytes) for f, num_bytes in enumerate(largest)]
    blocks = one_block * (min(candidate.num_block_slots, len(streamed)) + together - 1)
    edges = [layout.layers[i].size * item for i in sorted({0, last} - resident)]
    tied = any(s.tied_to for s in layout.layers[-1].segments)
    if candidate.num_edge_slots == 1 and not tied:
        edges = [max(edges)] if edges else []
    return (*blocks, *(SlotSpec("edge", num_bytes) for num_bytes in edges))


@dataclass(frozen=True)
class GradientPlacement:
    """Computes where the gradients of one candidate are, and how large the regions for them are, in bytes."""

    structure: ModelStructure
    layout: ModelLayout
    request: Request
    candidate: Candidate

    @cached_property
    def sums(self) -> torch.dtype:
        """Return the dtype of sums over micro-batches.

        It is FP32; with only one micro-batch over all GPUs it is the dtype of the gradient that autograd makes, if that
        is one for all parameters.
        """
        exact = self.request.sums_several or self.layout.has_wide
        return torch.float32 if exact else self.request.precision.working_dtype

    @cached_property
    def wire(self) -> torch.dtype:
        """Return the dtype in which gradients leave the device."""
        return torch.bfloat16 if self.request.round_gradients else self.sums

    @cached_property
    def deferred(self) -> frozenset[int]:
        """Return the host layers whose gradients leave the device only when all gradients are complete.

        There are none without clipping, with gradients that leave rounded, or if Muon trains anything: those leave as
        soon as they are complete.
        """
        if not self.request.clip or self.wire is not self.sums or self.layout.with_muon:
            return frozenset()
        on_host = [i for i in self.layout.updated if i not in self.candidate.hbm_layers]
        return frozenset(on_host if self.candidate.gradients is Tier.HBM else on_host[: self.candidate.num_waiting])

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each region on the device that gradients are summed in."""
        if self.candidate.sums is Tier.HOST:
            return self._ring(self.layout.updated, self.sums, 3)  # one is reloaded, one is added to, one leaves
        sizes = self._sizes(self._leaving, self.sums)
        if self.request.num_micro_batches > 1 and self.candidate.order is LoopOrder.MICRO_BATCHES_OUTER:
            return tuple(reversed(sizes))
        if self.wire is not self.sums:  # a rounded copy leaves: the region of the sum is free once it is made
            return (max(sizes),) if sizes else ()
        return self._ring(self._leaving, self.sums, 2)

    @property
    def leaving_slot_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each region that rounded sums leave from; empty if nothing is rounded.

        With layers outermost one region is enough: it is empty again long before all micro-batches of the next layer
        are done.
        """
        count = 1 if self.candidate.order is LoopOrder.LAYERS_OUTER else 2
        return () if self.wire is self.sums else self._ring(self._leaving, self.wire, count)

    def muon_slot_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes of each region for Muon's momenta, or for its directions; empty if Muon trains nothing.

        There are two regions, so that the work on one layer overlaps with the transfers of its neighbours. Each is as
        large as the largest part of a layer that a GPU has.

        itemsize: bytes of an element.
        """
        num_gpus = self.request.num_gpus
        sizes = [largest_part(self.layout.layers[i], num_gpus) * itemsize for i in self.layout.with_muon]
        return (max(sizes),) * min(2, len(sizes)) if sizes else ()

    @property
    def slab_bytes(self) -> int:
        """Return the bytes of the slab: host memory for gradients."""
        if self.candidate.sums is Tier.HOST:
            return sum(self._shares(self.layout.updated, self.sums))
        deferred = self._shares([i for i in self.layout.updated if i in self.deferred], self.wire)
        sizes = self._shares(self._leaving, self.wire)
        all_wait = self.request.clip or self.candidate.num_updated_late
        return (sum(sizes) if all_wait else in_flight(sizes)) + in_flight(deferred)

    @cached_property
    def _leaving(self) -> list[int]:
        """Return the layers whose gradients leave the device as soon as they are complete, in forward order."""
        waiting = self.candidate.hbm_layers | self.deferred
        return [i for i in self.layout.updated if i not in waiting]

    def _sizes(self, layers: Sequence[int], dtype: torch.dtype) -> list[int]:
        return [self.layout.trained_sizes[i] * dtype.itemsize for i in layers]

    def _shares(self, layers: Sequence[int], dtype: torch.dtype) -> list[int]:
        return [self.layout.host_trained_sizes[i] * dtype.itemsize for i in layers]

    def _ring(self, layers: Sequence[int], dtype: torch.dtype, count: int) -> tuple[int, ...]:
        """Return the bytes of `count` regions that blocks take in turn, and of one region for embedding and head.

        One is enough for embedding and head, because there is a forward or a backward between their gradients. They
        have no region of their own if that of a block is large enough. If they share a slot for weights, because device
        memory is small, theirs is one of those that blocks take: the embedding's gradient then waits until the last
        block's has left.
        """
        blocks, edges = (
            [i for i in layers if (self.structure.layers[i].kind is LayerKind.BLOCK) is are_blocks]
            for are_blocks in (True, False)
        )
        block_bytes, edge_bytes = (max(self._sizes(some, dtype), default=0) for some in (blocks, edges))
        larger = (edge_bytes,) if edge_bytes > block_bytes else ()
        if self.candidate.num_edge_slots == 1 and self.candidate.sums is Tier.HBM and not self.layout.with_muon:
            count -= len(larger)
        return (*larger, *(block_bytes,) * min(count, len(layers) - len(larger) if block_bytes else 0))


def in_flight(sizes: Sequence[int]) -> int:
    """Return the slab bytes for gradients of these sizes that pass through the slab.

    There is room for the largest one and at least for four of the median size, but never for more than all together.
    """
    return min(sum(sizes), max(*sizes, 4 * sorted(sizes)[len(sizes) // 2])) if sizes else 0
