"""Makes the plans of many candidates of one request, in as much detail as is asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout, largest_share
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.activation_staging import with_windows
from megatrain_ray.engine.plan.plan import ActivationPolicy, MemoryItem, Plan
from megatrain_ray.engine.plan.plan_shards import read_bytes
from megatrain_ray.engine.plan.step_residency import residency_of
from megatrain_ray.engine.planner.limits import beyond_disk, spare_ram
from megatrain_ray.engine.planner.memory.chunk_sizes import chunk_tokens
from megatrain_ray.engine.planner.memory.device_bytes import (
    ActivationRows,
    activation_rows,
    backward_bytes,
    beside_loss,
    device_memory_items,
    muon_row,
    resident_bytes,
    slot_rows,
    waiting_row,
)
from megatrain_ray.engine.planner.memory.gradient_placement import GradientPlacement
from megatrain_ray.engine.planner.memory.host_bytes import disk_memory_items, host_memory_items
from megatrain_ray.engine.planner.memory.layer_plans import LayerPlanBuilder
from megatrain_ray.engine.planner.memory.slots_and_slab import base_plan
from megatrain_ray.engine.planner.memory.spill_bytes import with_spilled
from megatrain_ray.engine.planner.memory.spill_choice import NOTHING, LayersOnDisk, Spillable
from megatrain_ray.engine.planner.request import Candidate, Machine, Request, SpillFirst

# Values of a candidate's fields that stand for all values, in keys of cached results that the fields do not change.
BLOCKS_ALIKE: dict[str, Any] = {"num_tail_blocks": 0, "tail_budget": 1.0, "kept": Tier.HBM, "num_staying": 0}
ALL_KEPT: dict[str, Any] = BLOCKS_ALIKE | {"activations": ActivationPolicy.KEEP, "activation_budget": 1.0}
ANY_SLOTS: dict[str, Any] = {"num_block_slots": 0, "num_edge_slots": 0}
NO_DISK: dict[str, Any] = {"spills_activations": False, "spill_first": SpillFirst.LEAST}
ANYWHERE: dict[str, Any] = ANY_SLOTS | NO_DISK | {
    "hbm_layers": frozenset(), "gradients": Tier.HOST, "num_waiting": 0, "sums": Tier.HBM
}  # fmt: skip
# Factor by which bytes on disk may grow, because each kind of each layer is filled up to whole pages.
PAGES = 2


@dataclass(frozen=True)
class PlanBuilder:
    """Makes plans of candidates, whether they fit or not, and caches what candidates share.

    The plans are complete but for their uploads, because simulating the slots takes most of the time. Each cached
    result is stored under a candidate that stands for all candidates with the same result.
    """

    structure: ModelStructure
    layout: ModelLayout
    activations: ActivationBytes
    machine: Machine
    request: Request
    placements: dict[Candidate, _Placement] = field(default_factory=dict)
    chunks: dict[Candidate, int] = field(default_factory=dict)
    activation_rows: dict[Candidate, ActivationRows] = field(default_factory=dict)
    host_memory_items: dict[Candidate, tuple[MemoryItem, ...]] = field(default_factory=dict)
    missing: dict[Candidate, int] = field(default_factory=dict)
    on_disk: dict[Candidate, LayersOnDisk] = field(default_factory=dict)
    host_rooms: dict[Candidate, int] = field(default_factory=dict)
    spillable: dict[Candidate, Spillable] = field(default_factory=dict)

    def plan(self, candidate: Candidate) -> Plan:
        """Return the candidate's plan with the rows of its memory."""
        plan, layout = self.in_memory(candidate), self.layout
        of_device = device_memory_items(plan, self.structure, layout, self.activations, z_loss=self.request.z_loss)
        on_disk = self.spilled(candidate)
        rows = self._host_rows(candidate, plan)
        if any(on_disk):
            plan = self._with_spilled(plan, candidate, on_disk)
            rows = (*host_memory_items(plan, layout), *disk_memory_items(plan, layout))
        plan = replace(plan, memory_items=(*of_device, *rows))
        return _with_copies(plan) if self.request.saves else plan

    def without_rows(self, candidate: Candidate) -> Plan:
        """Return the candidate's plan without the rows of its memory."""
        plan, on_disk = self.in_memory(candidate), self.spilled(candidate)
        return self._with_spilled(plan, candidate, on_disk) if any(on_disk) else plan

    def in_memory(self, candidate: Candidate) -> Plan:
        """Return the candidate's plan without rows, as if nothing spilled."""
        base = self._base_plan(candidate)
        return replace(
            base,
            layers=self._layers.of(candidate),
            compute=replace(base.compute, loss_chunk_tokens=self._chunk_tokens(base, candidate)),
        )

    def device_bytes(self, candidate: Candidate) -> int:
        """Return all bytes of device memory that the candidate's plan takes."""
        rows, placement = self._activation_rows(candidate), self._placement(candidate)
        num_bytes = rows.num_bytes + placement.num_bytes
        if waiting := candidate.hbm_layers | placement.deferred:
            num_bytes += waiting_row(placement.base, self.layout, rows.held, waiting, placement.deferred)[0]
        return num_bytes

    def least_device_bytes(self, candidate: Candidate) -> int:
        """Return the device bytes that remain with no layers on the device and no slots."""
        return self._activation_rows(candidate).num_bytes

    def host_room(self, candidate: Candidate) -> int:
        """Return a number that is above 0 if the candidate has room on the host and on disk.

        If the disk overflows, it is minus the bytes beyond the limit of the disk. Else it is the spare bytes of host
        memory, plus one.
        """
        key = self._of_all(candidate)
        if key not in self.host_rooms:
            plan = self.without_rows(candidate)
            rows = self._host_rows(candidate, plan)
            if any(self.spilled(candidate)):
                rows = (*host_memory_items(plan, self.layout), *disk_memory_items(plan, self.layout))
            plan = replace(plan, memory_items=rows)
            self.host_rooms[key] = -beyond_disk(plan) or self._spare(candidate, plan) + 1
        return self.host_rooms[key]

    def likely_room(self, candidate: Candidate) -> int:
        """Return a cheaper estimate of `host_room`: on a large disk as if everything was spilled that may be."""
        spill, missing = self.machine.spill, self.missing_ram(candidate)
        if missing > 0 and spill is not None:
            most = self._spillable(candidate).most
            if PAGES * most.num_bytes <= spill.limit_bytes:
                return most.gain - missing + 1
        return self.host_room(candidate)

    def spilled(self, candidate: Candidate) -> LayersOnDisk:
        """Return what of the candidate's plan is on disk: as much as host memory is too small for."""
        if self.machine.spill is None:
            return NOTHING
        key = self._of_all(candidate)
        if key not in self.on_disk:
            missing = self.missing_ram(candidate)
            self.on_disk[key] = self._spillable(candidate).choice(missing, key.spill_first) if missing > 0 else NOTHING
        return self.on_disk[key]

    def missing_ram(self, candidate: Candidate) -> int:
        """Return the bytes of host memory that are missing with nothing on disk; negative if there is room."""
        key = replace(self._of_all(candidate), **NO_DISK)
        if key not in self.missing:
            plan = self.in_memory(candidate)
            self.missing[key] = -self._spare(candidate, replace(plan, memory_items=self._host_rows(candidate, plan)))
        return self.missing[key]

    def _spillable(self, candidate: Candidate) -> Spillable:
        key = replace(self._of_host(candidate), spill_first=SpillFirst.LEAST)
        if key not in self.spillable:
            activations = candidate.spills_activations
            plan = self.in_memory(candidate)
            self.spillable[key] = Spillable(plan, self.structure, self.layout, activations=activations)
        return self.spillable[key]

    def _spare(self, candidate: Candidate, plan: Plan) -> int:
        """Return the spare bytes of host memory.

        plan: one whose rows are those of host memory only.
        """
        return spare_ram(plan) - (self.device_bytes(candidate) if self.machine.device == "cpu" else 0)

    def _with_spilled(self, plan: Plan, candidate: Candidate, on_disk: LayersOnDisk) -> Plan:
        layers = self._layers.of(candidate, on_disk)
        plan = with_spilled(plan, layers, self.layout) if on_disk.of_shards else replace(plan, layers=layers)
        return with_windows(plan)

    def _host_rows(self, candidate: Candidate, plan: Plan) -> tuple[MemoryItem, ...]:
        """Return the rows of host memory with nothing spilled."""
        key = self._of_host(candidate)
        if key not in self.host_memory_items:
            self.host_memory_items[key] = tuple(host_memory_items(plan, self.layout))
        return self.host_memory_items[key]

    def _of_host(self, candidate: Candidate) -> Candidate:
        """Return the candidate that stands for all that take the same host memory.

        Slots make no difference to the host, and neither does what is kept for a backward, unless it waits there.
        """
        offloads = candidate.kept is Tier.HOST and candidate.num_tail_blocks
        return replace(candidate, **ANY_SLOTS) if offloads else replace(candidate, **ANY_SLOTS, **ALL_KEPT)

    def _of_all(self, candidate: Candidate) -> Candidate:
        """Return the candidate that stands for all that lack the same host memory.

        On the CPU device this is the candidate itself, because what the device has takes host memory there.
        """
        return candidate if self.machine.device == "cpu" else self._of_host(candidate)

    def _placed(self, candidate: Candidate) -> Candidate:
        """Return the candidate that stands for all that differ only in what decides about activations."""
        return replace(candidate, **ALL_KEPT, boundaries=Tier.HBM, segment=1, **NO_DISK)

    def _base_plan(self, candidate: Candidate) -> Plan:
        return self._placement(candidate).base

    def _placement(self, candidate: Candidate) -> _Placement:
        key = self._placed(candidate)
        if key not in self.placements:
            base = base_plan(self.structure, self.layout, self.machine, self.request, key)
            of_slots = sum(num_bytes for num_bytes, _ in slot_rows(base).values())
            of_muon = muon_row(base, self.layout)[0] if self.layout.with_muon else 0
            of_layers = sum(self.resident_bytes[i] for i in candidate.hbm_layers)
            deferred = GradientPlacement(self.structure, self.layout, self.request, key).deferred
            self.placements[key] = _Placement(base, of_slots + of_muon + of_layers, deferred)
        return self.placements[key]

    def _activation_rows(self, candidate: Candidate) -> ActivationRows:
        """Return the rows of activations, the same wherever gradients are and whichever layers live on the device."""
        key = replace(candidate, **ANYWHERE)
        if key not in self.activation_rows:
            plan, z_loss = self.in_memory(key), self.request.z_loss
            rows = activation_rows(plan, self.structure, self.layout, self.activations, z_loss=z_loss)
            self.activation_rows[key] = rows
        return self.activation_rows[key]

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of layers that are blocks or parts of blocks."""
        return sum(layer.kind is LayerKind.BLOCK for layer in self.structure.layers)

    @cached_property
    def resident_bytes(self) -> tuple[int, ...]:
        """Return the device bytes of each layer if it lives there."""
        return tuple(resident_bytes(self.request.precision, layer) for layer in self.layout.layers)

    def _chunk_tokens(self, base: Plan, candidate: Candidate) -> int:
        """Return the tokens in a chunk of the loss.

        They do not depend on how many layers keep more, so keeping more never makes the loss slower.
        """
        alike = replace(candidate, **ANYWHERE, **BLOCKS_ALIKE)
        if alike not in self.chunks:
            plan = replace(base, layers=self._layers.of(alike))
            beside = beside_loss(plan, self.activations)
            backward = backward_bytes(plan, self.layout, self.activations)
            self.chunks[alike] = chunk_tokens(
                plan, self.structure, self.layout, beside=beside, backward=backward, z_loss=self.request.z_loss
            )
        return self.chunks[alike]

    @cached_property
    def _layers(self) -> LayerPlanBuilder:
        return LayerPlanBuilder(self.structure, self.layout, self.activations, self.request)


class _Placement(NamedTuple):
    """Holds what of a candidate's plan does not depend on activations.

    base: the plan without its layers.
    num_bytes: device bytes of slots, of layers that live on the device, and of Muon's work.
    deferred: host layers whose gradients wait on the device.
    """

    base: Plan
    num_bytes: int
    deferred: frozenset[int]


def _with_copies(plan: Plan) -> Plan:
    """Return the plan with memory for copies that saves make: up to half of the RAM that the plan leaves."""
    num_bytes = max(0, min(plan.updated_bytes // plan.hosts.num_hosts, spare_ram(plan) // 2))
    row = MemoryItem(Tier.HOST, "copies for saves", num_bytes, "up to half of the spare RAM")
    on_device = sum(layer.num_trained for layer in plan.layers if layer.updated_by == "gpu")
    of_device = num_bytes * on_device // plan.num_trained
    return replace(
        plan,
        memory_items=(*plan.memory_items, row),
        saves=replace(plan.saves, copy_bytes=num_bytes, device_copy_bytes=of_device),
    )


def build_plan(
    structure: ModelStructure,
    activations: ActivationBytes,
    machine: Machine,
    request: Request,
    candidate: Candidate,
) -> Plan:
    """Return the plan of one candidate, whether it fits or not."""
    layout = largest_share(structure.layout(request.num_fragments), request.num_hosts)
    draft = PlanBuilder(structure, layout, activations, machine, request).plan(candidate)
    return with_uploads(draft, structure, layout)


def with_uploads(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> Plan:
    """Return the plan with its uploads per step, and with the bytes of working copies read from disk for them."""
    of_step = plan.visits(layout.lowest_trained)
    loads = residency_of(of_step, structure, layout, plan).loads
    of_disk = read_bytes(plan, layout, (load.fragment for load in loads))
    return replace(
        plan,
        slots=replace(plan.slots, num_uploads=len(loads)),
        disk=replace(plan.disk, weight_read_bytes=of_disk),
    )
