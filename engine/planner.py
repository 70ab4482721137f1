"""The plan of one candidate: from a model's layout, a machine and limits to a Plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.flat_layout import CUT_ELEMENTS, NODE_CUT_ELEMENTS
from megatrain_ray.engine.layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import (
    ActivationPolicy,
    ByteCount,
    LayerPlan,
    Plan,
    Recovery,
    Tier,
    UpdateOrder,
)
from megatrain_ray.engine.plan_gradients import GradientPlaces, in_flight
from megatrain_ray.engine.plan_loss import chunk_tokens
from megatrain_ray.engine.plan_request import Candidate, Machine, Request
from megatrain_ray.engine.plan_rows import backward_bytes, beside_loss, hbm_rows, host_rows, nvme_rows
from megatrain_ray.engine.plan_spill import STATE_SLOTS, SpillOrder, beyond_disk
from megatrain_ray.engine.residency import FragmentId, Residency, SlotSpec, plan_residency
from megatrain_ray.engine.visits import LoopOrder, Visit, visits


def build_plan(
    structure: ModelStructure,
    activations: ActivationBytes,
    machine: Machine,
    request: Request,
    candidate: Candidate,
) -> Plan:
    """The plan of one candidate, whether it fits or not."""
    layout = structure.layout(request.num_fragments)
    return with_uploads(draft_plan(structure, layout, activations, machine, request, candidate), structure, layout)


def draft_plan(
    structure: ModelStructure,
    layout: ModelLayout,
    activations: ActivationBytes,
    machine: Machine,
    request: Request,
    candidate: Candidate,
    drafts: Drafts | None = None,
) -> Plan:
    """The same, but that uploads are not counted: to simulate the slots takes most of the time. `drafts`: of what is
    the same but for the candidate."""
    return _Builder(structure, layout, activations, machine, request, candidate, drafts or Drafts()).plan()


@dataclass(frozen=True)
class Drafts:
    """Parts of plans that many candidates of one request share."""

    frames: dict[Candidate, Plan] = field(default_factory=dict)
    layers: dict[Candidate, dict[tuple[int, bool, bool, bool], LayerPlan]] = field(default_factory=dict)
    chunks: dict[Candidate, int] = field(default_factory=dict)
    spill_orders: dict[frozenset[int], SpillOrder] = field(default_factory=dict)  # by layers on the device


def with_uploads(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> Plan:
    of_step = visits(len(layout.layers), plan.num_micro_batches, plan.order, layout.lowest_trained)
    return replace(plan, uploads_per_step=len(residency_of(of_step, structure, layout, plan).loads))


def fits(plan: Plan) -> bool:
    return missing_bytes(plan) == 0


def missing_bytes(plan: Plan) -> int:
    """Beyond all limits together; 0 where the plan fits."""
    limit = plan.hbm_limit_bytes
    of_device = 0 if limit is None else max(0, plan.total_bytes(Tier.HBM) - limit)
    return of_device + max(0, -spare_ram(plan)) + beyond_disk(plan)


def spare_ram(plan: Plan) -> int:
    """Bytes of the host's limit that the plan leaves; negative where it does not fit."""
    on_host = plan.total_bytes(Tier.HOST) + (plan.total_bytes(Tier.HBM) if plan.device == "cpu" else 0)
    return plan.ram_limit_bytes - on_host


def residency_of(visits: Sequence[Visit], structure: ModelStructure, layout: ModelLayout, plan: Plan) -> Residency:
    """What is in the plan's slots during these visits."""
    item = plan.precision.working_dtype.itemsize
    num_bytes: dict[FragmentId, int] = {}
    groups: dict[FragmentId, str] = {}
    for i, layer in enumerate(layout.layers):
        for f, span in enumerate(layer.fragments):
            num_bytes[FragmentId(i, f)] = span.size * item
            groups[FragmentId(i, f)] = group_of(structure.layers[i].kind, f)
    resident = plan.hbm_layers
    of_layers = [streamed(needed_fragments(layout, layer), resident) for layer in range(len(layout.layers))]
    needs = [of_layers[visit.layer] for visit in visits]
    return plan_residency(needs, num_bytes, groups, plan.slots)


def group_of(kind: LayerKind, fragment: int) -> str:
    return f"block/{fragment}" if kind is LayerKind.BLOCK else "edge"


def needed_fragments(layout: ModelLayout, layer: int) -> tuple[FragmentId, ...]:
    """Of the layer itself and of the owners of its tied parameters."""
    return tuple(FragmentId(i, f) for i in layout.sources[layer] for f in range(len(layout.layers[i].fragments)))


def streamed(fragments: Sequence[FragmentId], hbm_layers: Set[int]) -> tuple[FragmentId, ...]:
    """Those that do not live on the device."""
    return tuple(fragment for fragment in fragments if fragment.layer not in hbm_layers)


def _blocks_together(structure: ModelStructure, layout: ModelLayout, layer: int, hbm_layers: Set[int]) -> int:
    """Blocks that must be in slots at once for a visit to the layer: itself and those it shares weights with."""
    needed = (i for i in layout.sources[layer] if i not in hbm_layers)
    return sum(structure.layers[i].kind is LayerKind.BLOCK for i in needed)


@dataclass(frozen=True)
class _Builder:
    """Fills in a plan for one candidate."""

    structure: ModelStructure
    layout: ModelLayout
    activations: ActivationBytes
    machine: Machine
    request: Request
    candidate: Candidate
    drafts: Drafts

    def plan(self) -> Plan:
        """What is kept for a backward decides about layers and device memory alone."""
        c = self.candidate
        where = replace(c, activations=ActivationPolicy.KEEP, activation_budget=1.0, num_late=0, late_budget=1.0)
        if where not in self.drafts.frames:
            self.drafts.frames[where] = self._frame()
        frame = self.drafts.frames[where]
        plan = replace(frame, layers=self._layers(), loss_chunk_tokens=self._chunk_tokens(frame))
        hbm = hbm_rows(plan, self.structure, self.layout, self.activations, z_loss=self.request.z_loss)
        plan = self._spilling(replace(plan, rows=(*hbm, *frame.rows)))
        return self._with_copies(plan) if self.request.saves else plan

    def _frame(self) -> Plan:
        """All but the rows of device memory."""
        r, c, m = self.request, self.candidate, self.machine
        num_shards = m.shards(r.num_shards)
        slots = self._slots()
        plan = Plan(
            version=1,
            device=m.device,
            precision=r.precision,
            order=c.order,
            micro_batch_size=r.micro_batch_size,
            num_micro_batches=r.num_micro_batches,
            seq_len=r.seq_len,
            attention=r.attention,
            packed_attention=r.packed_attention,
            layers=self._layers(),
            slots=slots,
            gradient_slot_bytes=self._gradients.slot_bytes,
            leaving_slot_bytes=self._gradients.leaving_slot_bytes,
            momentum_slot_bytes=self._gradients.muon_slot_bytes(torch.float32.itemsize),
            direction_slot_bytes=self._gradients.muon_slot_bytes(DIRECTION_BYTES),
            gradient_dtype=_name(self._gradients.wire),
            sum_dtype=_name(self._gradients.sums),
            sums=c.sums,
            slab_bytes=self._gradients.slab_bytes,
            direction_slab_bytes=in_flight(self.layout.direction_bytes),
            update_order=UpdateOrder.FORWARD if r.clip else UpdateOrder.BACKWARD,
            loss_chunk_tokens=0,  # what is kept decides about it
            compiled_loss=r.compiled,
            chunks_add_to_sums=r.num_micro_batches > 1 and bool(self.structure.loss_parameters),
            num_shards=num_shards,
            shard_cut_elements=NODE_CUT_ELEMENTS if m.num_nodes > 1 else CUT_ELEMENTS,
            num_compute_threads=max(1, m.num_cpus),
            num_shard_threads=max(1, m.num_cpus // num_shards),
            recovery=Recovery.IN_PLACE,  # all state is updated in host memory, and updates are logged there
            uploads_per_step=0,
            saves_frozen=r.saves_frozen,
            save_copy_bytes=0,
            device_copy_bytes=0,
            state_slots=0,
            hbm_limit_bytes=m.hbm_bytes,
            ram_limit_bytes=m.ram_bytes,
            spill_limit_bytes=m.spill.limit_bytes if m.spill else None,
            rows=(),
            captured=bool(r.captured),
        )
        return replace(plan, rows=tuple(host_rows(plan, self.layout)))

    def _spilling(self, plan: Plan) -> Plan:
        """With state on disk where the host has too little memory. `plan`: in which nothing is there."""
        missing = -spare_ram(plan)
        if self.machine.spill is None or missing <= 0:
            return plan
        orders, on_device = self.drafts.spill_orders, self.candidate.hbm_layers
        if on_device not in orders:
            orders[on_device] = SpillOrder.of(plan, self.structure, self.layout)
        spilled = orders[on_device].first(missing)
        if not spilled:
            return plan
        plan = replace(plan, layers=self._layers(spilled), state_slots=STATE_SLOTS)
        of_device = (row for row in plan.rows if row.tier is Tier.HBM)
        return replace(plan, rows=(*of_device, *host_rows(plan, self.layout), *nvme_rows(plan, self.layout)))

    def _chunk_tokens(self, frame: Plan) -> int:
        """However many layers keep more: that never makes the loss slower."""
        alike = replace(self.candidate, hbm_layers=frozenset(), num_late=0, late_budget=1.0)
        if alike not in self.drafts.chunks:
            plan = replace(frame, layers=replace(self, candidate=alike)._layers())
            beside = beside_loss(plan, self.activations)
            backward = backward_bytes(plan, self.layout, self.activations)
            self.drafts.chunks[alike] = chunk_tokens(
                plan, self.structure, self.layout, beside=beside, backward=backward, z_loss=self.request.z_loss
            )
        return self.drafts.chunks[alike]

    def _with_copies(self, plan: Plan) -> Plan:
        """Half of the RAM that the plan leaves may hold copies for saves."""
        num_bytes = max(0, min(plan.updated_bytes, spare_ram(plan) // 2))
        row = ByteCount(Tier.HOST, "copies for saves", num_bytes, "up to half of the spare RAM")
        on_device = sum(layer.num_trained for layer in plan.layers if layer.updated_by == "gpu")
        of_device = num_bytes * on_device // plan.num_trained
        return replace(plan, save_copy_bytes=num_bytes, device_copy_bytes=of_device, rows=(*plan.rows, row))

    @cached_property
    def _gradients(self) -> GradientPlaces:
        return GradientPlaces(self.structure, self.layout, self.request, self.candidate)

    def _layers(self, spilled: Set[int] = frozenset()) -> tuple[LayerPlan, ...]:
        c, order = self.candidate, LoopOrder.MICRO_BATCHES_OUTER
        alike = replace(c, order=order, num_block_slots=0, num_edge_slots=0, hbm_layers=frozenset(), num_late=0)
        known = self.drafts.layers.setdefault(alike, {})
        first_late = self._first_late
        keys = [(i, i in c.hbm_layers, i >= first_late, i in spilled) for i in range(len(self.layout.layers))]
        return tuple(known.get(key) or known.setdefault(key, self._layer(key[0], spills=key[3])) for key in keys)

    def _layer(self, index: int, *, spills: bool) -> LayerPlan:
        layer, compiled = self.layout.layers[index], self._is_compiled(index)
        tier = Tier.HBM if index in self.candidate.hbm_layers else Tier.HOST
        waits = Tier.HBM if self._gradients.wait_on_device(index) else Tier.HOST
        return LayerPlan(
            name=layer.name,
            num_parameters=layer.logical_size,
            num_trained=layer.num_trained,
            num_muon=layer.num_muon,
            num_fragments=len(layer.fragments),
            weights=tier,
            state=Tier.NVME if spills else tier,
            gradients=waits,
            boundary=Tier.HOST if self._leaves(index) else Tier.HBM,
            boundary_bytes=self.activations.boundary[index],
            activations=self._policy(index),
            compiled=compiled,
            activation_budget=self._budget(index) if compiled else 1.0,
            updated_by=("gpu" if tier is Tier.HBM else "cpu") if layer.num_trained else "nobody",
        )

    def _leaves(self, index: int) -> bool:
        """Whether what enters the layer waits on the host. Where nothing is trained before it no gradient goes back,
        and what enters stays what it is."""
        private, behind_trained = self.activations.private, index > self.layout.lowest_trained
        return self.candidate.boundaries is Tier.HOST and behind_trained and bool(private and private[index])

    def _policy(self, layer: int) -> ActivationPolicy:
        """The embedding keeps only indices, the head's loss runs at once, a compiled layer has its budget: for these
        there is nothing to recompute."""
        is_block = self.structure.layers[layer].kind is LayerKind.BLOCK
        return self.candidate.activations if is_block and not self._is_compiled(layer) else ActivationPolicy.KEEP

    def _is_compiled(self, layer: int) -> bool:
        """Where it can have the candidate's budget."""
        return self.request.compiled and self.activations.has_budget(layer, self._budget(layer))

    def _budget(self, layer: int) -> float:
        """Blocks of the forward's end have the larger one: what they keep goes first, and gradients take its place."""
        return self.candidate.late_budget if layer >= self._first_late else self.candidate.activation_budget

    @property
    def _first_late(self) -> int:
        return len(self.layout.layers) - 1 - self.candidate.num_late

    def _slots(self) -> tuple[SlotSpec, ...]:
        item = self.request.precision.working_dtype.itemsize
        kinds = [spec.kind for spec in self.structure.layers]
        largest: dict[int, int] = {}
        resident = self.candidate.hbm_layers
        num_streamed = sum(kind is LayerKind.BLOCK and i not in resident for i, kind in enumerate(kinds))
        for i, (layer, kind) in enumerate(zip(self.layout.layers, kinds, strict=True)):
            for f, span in enumerate(layer.fragments if kind is LayerKind.BLOCK and i not in resident else ()):
                largest[f] = max(largest.get(f, 0), span.size * item)
        together = max(_blocks_together(self.structure, self.layout, i, resident) for i in range(len(kinds)))
        blocks = [
            SlotSpec(group_of(LayerKind.BLOCK, f), num_bytes)
            for _ in range(min(self.candidate.num_block_slots, num_streamed) + together - 1)
            for f, num_bytes in largest.items()
        ]
        ends = {0, len(kinds) - 1} - resident
        edges = [self.layout.layers[i].size * item for i in sorted(ends)]
        tied = any(s.tied_to for s in self.layout.layers[-1].segments)
        if self.candidate.num_edge_slots == 1 and not tied:
            edges = [max(edges)] if edges else []
        return (*blocks, *(SlotSpec("edge", num_bytes) for num_bytes in edges))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
