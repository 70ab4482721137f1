"""Makes the part of a candidate's plan that depends neither on activations nor on what is on disk.

This part is slots, slab and settings.
"""

from __future__ import annotations

import torch

from megatrain_ray.engine.device.numa_homes import fewest_cpus, gpu_homes, shard_homes
from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, NODE_CUT_ELEMENTS
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
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
    StepShape,
    UpdateOrder,
)
from megatrain_ray.engine.plan.residency import SlotSpec, group_of
from megatrain_ray.engine.planner.memory.gradient_placement import GradientPlacement, in_flight
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.io.storage.disk_io import DiskIo


def base_plan(
    structure: ModelStructure, layout: ModelLayout, machine: Machine, request: Request, candidate: Candidate
) -> Plan:
    """Return a candidate's plan without what depends on activations or on the disk.

    It lacks layers, rows, the tokens of a chunk of the loss, and everything that follows from what is on disk.
    """
    r, c, m = request, candidate, machine
    num_shards = m.shards(r.num_shards)
    homes = shard_homes(m.nodes, num_shards)
    gradients = GradientPlacement(structure, layout, request, candidate)
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
        ),
        compute=ComputeSettings(
            attention=r.attention,
            packed_attention=r.packed_attention,
            loss_chunk_tokens=0,
            compiled_loss=r.compiled,
            chunks_add_to_sums=r.sums_several and bool(structure.loss_parameters),
            num_threads=max(1, m.num_cpus * r.num_hosts // r.num_gpus),
            mlp_chunk_tokens=r.mlp_chunk_tokens,
            block_parts=max(map(len, structure.blocks)),
            expert_groups=structure.expert_groups,
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
        limits=MemoryLimits(m.hbm_bytes, m.ram_bytes, m.spill.limit_bytes if m.spill else None),
    )


def _slots(
    structure: ModelStructure, layout: ModelLayout, request: Request, candidate: Candidate
) -> tuple[SlotSpec, ...]:
    item = request.precision.working_dtype.itemsize
    resident, last = candidate.hbm_layers, len(layout.layers) - 1
    is_block = [layer.kind is LayerKind.BLOCK for layer in structure.layers]
    streamed = [x for i, x in enumerate(layout.layers) if i not in resident and is_block[i]]
    largest: dict[int, int] = {}
    for layer in streamed:
        for f, span in enumerate(layer.fragments):
            largest[f] = max(largest.get(f, 0), span.size * item)
    # A visit to a layer needs several blocks in slots at once: the layer itself and those it shares weights with.
    shared = [sources for sources in layout.sources if len(sources) > 1]
    at_once = (sum(is_block[i] for i in sources if i not in resident) for sources in shared)
    together = max([min(1, len(streamed)), *at_once])
    of_one = [SlotSpec(group_of(LayerKind.BLOCK, f), num_bytes) for f, num_bytes in largest.items()]
    blocks = of_one * (min(candidate.num_block_slots, len(streamed)) + together - 1)
    edges = [layout.layers[i].size * item for i in sorted({0, last} - resident)]
    tied = any(s.tied_to for s in layout.layers[-1].segments)
    if candidate.num_edge_slots == 1 and not tied:
        edges = [max(edges)] if edges else []
    return (*blocks, *(SlotSpec("edge", num_bytes) for num_bytes in edges))
