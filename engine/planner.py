"""The plan of one candidate: from a model's layout, a machine and limits to a Plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.activation_space import with_windows
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
from megatrain_ray.engine.plan_rows import backward_bytes, beside_loss, hbm_rows, host_rows, kept_bytes, nvme_rows
from megatrain_ray.engine.plan_spill import OnDisk, SpillOrder, beyond_disk, with_spilled
from megatrain_ray.engine.residency import FragmentId, Residency, SlotSpec, plan_residency
from megatrain_ray.engine.visits import LoopOrder, Visit
from megatrain_ray.io.disk_io import DiskIo


def build_plan(
    structure: ModelStructure,
    activations: ActivationBytes,
    machine: Machine,
    request: Request,
    candidate: Candidate,
) -> Plan:
    """The plan of one candidate, whether it fits or not."""
    layout = structure.layout(request.num_fragments)
    draft = Drafts(structure, layout, activations, machine, request).plan(candidate)
    return with_uploads(draft, structure, layout)


NOTHING = OnDisk()


@dataclass(frozen=True)
class Drafts:
    """Plans of candidates of one request, fitting or not, but that uploads are not counted: to simulate the slots takes
    most of the time. What many of them share is made once."""

    structure: ModelStructure
    layout: ModelLayout
    activations: ActivationBytes
    machine: Machine
    request: Request
    of_device: dict[Candidate, Plan] = field(default_factory=dict)
    frames: dict[Candidate, Plan] = field(default_factory=dict)
    host_rows: dict[Candidate, tuple[ByteCount, ...]] = field(default_factory=dict)
    layers: dict[tuple[Candidate, OnDisk], tuple[LayerPlan, ...]] = field(default_factory=dict)  # and what spills
    layer: dict[Candidate, dict[tuple[int | bool, ...], LayerPlan]] = field(default_factory=dict)
    chunks: dict[Candidate, int] = field(default_factory=dict)
    # By layers on the device, and by where gradients and sums wait; of all where activations may spill.
    spill_orders: dict[tuple[frozenset[int], Tier, int, Tier] | Candidate, SpillOrder] = field(default_factory=dict)

    def plan(self, candidate: Candidate) -> Plan:
        return self._builder(candidate).plan()

    def on_device(self, candidate: Candidate) -> Plan:
        """The same without what the host decides about: with rows of device memory alone, and nothing spills."""
        if candidate not in self.of_device:
            self.of_device[candidate] = self._builder(candidate).on_device()
        return self.of_device[candidate]

    def without_rows(self, candidate: Candidate) -> Plan:
        """The same without its arithmetic."""
        return self._builder(candidate).without_rows()

    def _builder(self, candidate: Candidate) -> _Builder:
        return _Builder(self.structure, self.layout, self.activations, self.machine, self.request, candidate, self)


def without_late(candidate: Candidate) -> Candidate:
    """Whose blocks all keep alike."""
    return replace(candidate, num_late=0, late_budget=1.0, kept=Tier.HBM, num_staying=0)


def with_uploads(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> Plan:
    of_step = plan.visits(layout.lowest_trained)
    loads = residency_of(of_step, structure, layout, plan).loads
    of_disk = (load.fragment for load in loads if load.fragment.layer in plan.weights_on_disk)
    elements = sum(layout.layers[fragment.layer].fragments[fragment.index].size for fragment in of_disk)
    read_bytes = elements * plan.precision.working_dtype.itemsize
    return replace(plan, uploads_per_step=len(loads), weight_read_bytes=read_bytes)


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
        plan = self.drafts.on_device(self.candidate)
        plan = self._spilling(replace(plan, rows=(*plan.rows, *self._host_rows(plan))))
        return self._with_copies(plan) if self.request.saves else plan

    def without_rows(self) -> Plan:
        frame = self._frame()
        return replace(frame, layers=self._layers(), loss_chunk_tokens=self._chunk_tokens(frame))

    def on_device(self) -> Plan:
        """Without what the host decides about: its rows, and what spills."""
        plan = self.without_rows()
        hbm = hbm_rows(plan, self.structure, self.layout, self.activations, z_loss=self.request.z_loss)
        return replace(plan, rows=tuple(hbm))

    @cached_property
    def _where(self) -> Candidate:
        """What is kept for a backward decides about layers and device memory alone, unless it waits on the host."""
        return replace(without_late(self.candidate), activations=ActivationPolicy.KEEP, activation_budget=1.0)

    def _host_rows(self, plan: Plan) -> tuple[ByteCount, ...]:
        """Where nothing spills. Slots make no difference."""
        if plan.kept_bytes:
            return tuple(host_rows(plan, self.layout))
        alike = replace(self._where, num_block_slots=0, num_edge_slots=0)
        if alike not in self.drafts.host_rows:
            self.drafts.host_rows[alike] = tuple(host_rows(plan, self.layout))
        return self.drafts.host_rows[alike]

    def _frame(self) -> Plan:
        if self._where not in self.drafts.frames:
            self.drafts.frames[self._where] = self._make_frame()
        return self.drafts.frames[self._where]

    def _make_frame(self) -> Plan:
        """All but layers, rows, and what follows from what is kept."""
        r, c, m = self.request, self.candidate, self.machine
        num_shards = m.shards(r.num_shards)
        return Plan(
            version=1,
            device=m.device,
            precision=r.precision,
            order=c.order,
            micro_batch_size=r.micro_batch_size,
            num_micro_batches=r.num_micro_batches,
            seq_len=r.seq_len,
            attention=r.attention,
            packed_attention=r.packed_attention,
            layers=(),
            slots=self._slots(),
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
            loss_chunk_tokens=0,
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
            extent_elements=0,
            state_slots=0,
            hbm_limit_bytes=m.hbm_bytes,
            ram_limit_bytes=m.ram_bytes,
            spill_limit_bytes=m.spill.limit_bytes if m.spill else None,
            rows=(),
            captured=bool(r.captured),
            mlp_chunk_tokens=r.mlp_chunk_tokens,
            disk_io=m.spill.way.io if m.spill else DiskIo.POSIX,
            disk_packed=bool(m.spill and m.spill.way.packed),
        )

    def _spilling(self, plan: Plan) -> Plan:
        """With as much on disk as the host has too little memory for. `plan`: in which nothing is there."""
        missing = -spare_ram(plan)
        if self.machine.spill is None or missing <= 0:
            return plan
        orders, c = self.drafts.spill_orders, self.candidate
        key = c if c.spills_activations else (c.hbm_layers, c.gradients, c.num_waiting, c.sums)
        if key not in orders:
            orders[key] = SpillOrder.of(plan, self.structure, self.layout, activations=c.spills_activations)
        on_disk = orders[key].first(missing)
        if not any(on_disk):
            return plan
        layers = self._layers(on_disk)
        plan = with_spilled(plan, layers, self.layout) if on_disk.of_shards else replace(plan, layers=layers)
        plan = with_windows(plan)
        of_device = (row for row in plan.rows if row.tier is Tier.HBM)
        return replace(plan, rows=(*of_device, *host_rows(plan, self.layout), *nvme_rows(plan, self.layout)))

    def _chunk_tokens(self, frame: Plan) -> int:
        """However many layers keep more: that never makes the loss slower."""
        alike = replace(without_late(self.candidate), hbm_layers=frozenset(), num_waiting=0)
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

    def _layers(self, on_disk: OnDisk = NOTHING) -> tuple[LayerPlan, ...]:
        order = LoopOrder.MICRO_BATCHES_OUTER
        alike = replace(self.candidate, order=order, num_block_slots=0, num_edge_slots=0, sums=Tier.HBM)
        if (alike, on_disk) not in self.drafts.layers:
            self.drafts.layers[alike, on_disk] = self._make_layers(alike, on_disk)
        return self.drafts.layers[alike, on_disk]

    def _make_layers(self, alike: Candidate, on_disk: OnDisk) -> tuple[LayerPlan, ...]:
        on_device, first_late = self.candidate.hbm_layers, self._first_late
        known = self.drafts.layer.setdefault(replace(alike, hbm_layers=frozenset(), num_late=0, num_staying=0), {})
        layers, offloaded = range(len(self.layout.layers)), self._offloaded
        keys = [
            (i, i in on_device, i >= first_late, i in offloaded, *(i in of_kind for of_kind in on_disk)) for i in layers
        ]
        return tuple([known.get(key) or known.setdefault(key, self._layer(key[0], on_disk)) for key in keys])

    def _layer(self, index: int, on_disk: OnDisk) -> LayerPlan:
        layer, budget = self.layout.layers[index], self._budget(index)
        compiled = self.request.compiled and self.activations.has_budget(index, budget)
        tier = Tier.HBM if index in self.candidate.hbm_layers else Tier.HOST
        waits = Tier.HBM if self._gradients.wait_on_device(index) else Tier.HOST
        plan = LayerPlan(
            name=layer.name,
            num_parameters=layer.logical_size,
            num_trained=layer.num_trained,
            num_muon=layer.num_muon,
            num_fragments=len(layer.fragments),
            weights=Tier.NVME if index in on_disk.weights else tier,
            state=Tier.NVME if index in on_disk.state else tier,
            gradients=Tier.NVME if index in on_disk.gradients else waits,
            boundary=Tier.NVME if index in on_disk.boundaries else self._boundary(index),
            boundary_bytes=self.activations.boundary[index],
            activations=ActivationPolicy.KEEP if compiled else self._policy(index),
            compiled=compiled,
            activation_budget=budget if compiled else 1.0,
            updated_by=("gpu" if tier is Tier.HBM else "cpu") if layer.num_trained else "nobody",
        )
        kept = kept_bytes(self.activations, index, plan) if index in self._offloaded else 0
        where = Tier.NVME if index in on_disk.kept else Tier.HOST
        return replace(plan, kept=where, kept_bytes=kept) if kept else plan

    def _boundary(self, index: int) -> Tier | None:
        """Where what enters the layer waits. Where nothing is trained before it no gradient goes back, and what enters
        stays what it is."""
        a, lowest = self.activations, self.layout.lowest_trained
        in_segment = (index - max(1, lowest)) % self.candidate.segment  # behind the embedding
        if index > lowest and in_segment and a.replayable and a.replayable[index]:
            return None
        leaves = self.candidate.boundaries is Tier.HOST and index > lowest and a.private and a.private[index]
        return Tier.HOST if leaves else Tier.HBM

    def _policy(self, layer: int) -> ActivationPolicy:
        """Of a layer that is not compiled, which has its budget. The embedding keeps only indices, the head's loss runs
        at once: for these there is nothing to recompute."""
        return self.candidate.activations if self._is_block(layer) else ActivationPolicy.KEEP

    def _budget(self, layer: int) -> float:
        """Blocks of the forward's end have the larger one: what they keep goes first, and gradients take its place."""
        return self.candidate.late_budget if layer >= self._first_late else self.candidate.activation_budget

    @cached_property
    def _first_late(self) -> int:
        return len(self.layout.layers) - 1 - self.candidate.num_late

    @property
    def _offloaded(self) -> range:
        """Layers whose kept activations wait elsewhere, those with a backward."""
        if self.candidate.kept is Tier.HBM:
            return range(0)
        first = max(self._first_late, self.layout.lowest_trained)
        return range(first, len(self.layout.layers) - 1 - self.candidate.num_staying)

    def _slots(self) -> tuple[SlotSpec, ...]:
        item = self.request.precision.working_dtype.itemsize
        largest: dict[int, int] = {}
        resident, last = self.candidate.hbm_layers, len(self.layout.layers) - 1
        streamed = [x for i, x in enumerate(self.layout.layers) if i not in resident and self._is_block(i)]
        for layer in streamed:
            for f, span in enumerate(layer.fragments):
                largest[f] = max(largest.get(f, 0), span.size * item)
        shared = [i for i, sources in enumerate(self.layout.sources) if len(sources) > 1]
        together = max([min(1, len(streamed)), *(self._blocks_together(i) for i in shared)])
        of_one = [SlotSpec(group_of(LayerKind.BLOCK, f), num_bytes) for f, num_bytes in largest.items()]
        blocks = of_one * (min(self.candidate.num_block_slots, len(streamed)) + together - 1)
        edges = [self.layout.layers[i].size * item for i in sorted({0, last} - resident)]
        tied = any(s.tied_to for s in self.layout.layers[-1].segments)
        if self.candidate.num_edge_slots == 1 and not tied:
            edges = [max(edges)] if edges else []
        return (*blocks, *(SlotSpec("edge", num_bytes) for num_bytes in edges))

    def _blocks_together(self, layer: int) -> int:
        """Blocks that must be in slots at once for a visit to the layer: itself and those it shares weights with."""
        resident = self.candidate.hbm_layers
        return sum(self._is_block(i) for i in self.layout.sources[layer] if i not in resident)

    def _is_block(self, layer: int) -> bool:
        return self.structure.layers[layer].kind is LayerKind.BLOCK


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
