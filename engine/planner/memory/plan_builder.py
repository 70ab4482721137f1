"""Makes the plans of many candidates of one request, in as much detail as is asked for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.activation_staging import with_staging_buffers
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan, MemoryItem, Plan
from megatrain_ray.engine.plan.plan_shards import read_bytes
from megatrain_ray.engine.plan.residency import residency_of
from megatrain_ray.engine.planner.limits import beyond_disk, spare_ram
from megatrain_ray.engine.planner.memory.alike import Alike
from megatrain_ray.engine.planner.memory.base_plan import GradientPlacement, base_plan
from megatrain_ray.engine.planner.memory.chunk_sizes import chunk_tokens
from megatrain_ray.engine.planner.memory.device_bytes import (
    ActivationRows,
    activation_rows,
    device_memory_items,
    muon_row,
    resident_bytes,
    slot_rows,
    waiting_row,
)
from megatrain_ray.engine.planner.memory.host_bytes import disk_memory_items, host_memory_items
from megatrain_ray.engine.planner.memory.layer_plans import LayerPlanBuilder
from megatrain_ray.engine.planner.memory.spill_bytes import with_spilled
from megatrain_ray.engine.planner.memory.spill_choice import NOTHING, LayersOnDisk, Spillable
from megatrain_ray.engine.planner.memory.work_bytes import backward_bytes_by_layer, bytes_held_during_loss
from megatrain_ray.engine.planner.request import Candidate, Machine, Request, SpillFirst

# Values of a candidate's fields that stand for all values, where these make no difference to a result.
BLOCKS_ALIKE: dict[str, Any] = {"num_tail_blocks": 0, "tail_budget": 1.0, "kept": Tier.HBM, "num_offloading": 0}
ALL_KEPT: dict[str, Any] = BLOCKS_ALIKE | {"activations": ActivationPolicy.KEEP, "activation_budget": 1.0}
ANY_SLOTS: dict[str, Any] = {"num_block_slots": 0, "num_edge_slots": 0}
ANY_SPILL_ORDER: dict[str, Any] = {"spill_first": SpillFirst.LEAST}
NO_DISK: dict[str, Any] = ANY_SPILL_ORDER | {"spills_activations": False}
ANYWHERE: dict[str, Any] = ANY_SLOTS | NO_DISK | {
    "hbm_layers": frozenset(), "gradients": Tier.HOST, "num_waiting": 0, "sums": Tier.HBM, "num_updated_late": 0
}  # fmt: skip
# Factor by which bytes on disk may grow, because each kind of each layer is filled up to whole pages.
PAGES = 2

Result = TypeVar("Result")
Choice = Callable[["PlanBuilder", Candidate], Alike]


def cached_by(
    choice: Choice,
) -> Callable[[Callable[[PlanBuilder, Candidate], Result]], Callable[[PlanBuilder, Candidate], Result]]:
    """Return a decorator for methods of PlanBuilder, whose results are computed once and kept.

    choice: says which candidates share a candidate's result. The method is called with their representative.
    """

    def decorate(method: Callable[[PlanBuilder, Candidate], Result]) -> Callable[[PlanBuilder, Candidate], Result]:
        @wraps(method)
        def cached(builder: PlanBuilder, candidate: Candidate) -> Result:
            alike, known = choice(builder, candidate), builder.results[method.__name__]
            key = alike.key(candidate)
            if key not in known:
                known[key] = method(builder, alike.representative(candidate))
            result: Result = known[key]
            return result

        return cached

    return decorate


def _always(values: dict[str, Any]) -> Choice:
    """Choose candidates that differ in these fields."""
    alike = Alike(values)
    return lambda builder, candidate: alike


def _same_host_bytes(values: dict[str, Any]) -> Choice:
    """Choose candidates that take the same host memory if they differ in these fields.

    Slots make no difference to the host, and neither does what is kept for a backward, unless it waits there.
    """
    offloading, others = Alike(values | ANY_SLOTS), Alike(values | ANY_SLOTS | ALL_KEPT)
    return lambda builder, candidate: offloading if candidate.num_offloading else others


def _same_room(values: dict[str, Any]) -> Choice:
    """Choose candidates that leave the same host memory if they differ in these fields.

    On the CPU device nothing else makes no difference, because what the device has takes host memory there.
    """
    on_cpu, others = Alike(values), _same_host_bytes(values)
    return lambda builder, candidate: on_cpu if builder.machine.device == "cpu" else others(builder, candidate)


@dataclass(frozen=True)
class PlanBuilder:
    """Makes plans of candidates, whether they fit or not.

    The plans are complete but for their uploads, because simulating the slots takes most of the time. A search asks for
    thousands of plans that differ in few fields, so results that do not depend on these are kept (`cached_by`).
    """

    structure: ModelStructure
    layout: ModelLayout
    activations: ActivationBytes
    machine: Machine
    request: Request
    results: defaultdict[str, dict[tuple[Any, ...], Any]] = field(default_factory=lambda: defaultdict(dict))

    def plan(self, candidate: Candidate) -> Plan:
        """Return the candidate's plan with the rows of its memory."""
        plan = self.without_rows(candidate)
        in_memory = self.in_memory(candidate)
        device_items = device_memory_items(
            in_memory, self.structure, self.layout, self.activations, self.request.objective
        )
        plan = replace(plan, memory_items=(*device_items, *self._host_and_disk_items(candidate, plan)))
        return _with_copies(plan) if self.request.saves else plan

    def without_rows(self, candidate: Candidate) -> Plan:
        """Return the candidate's plan without the rows of its memory."""
        plan, on_disk = self.in_memory(candidate), self.spilled(candidate)
        if not any(on_disk):
            return plan
        layers = self._layers.of(candidate, self._placement(candidate).deferred, on_disk)
        plan = with_spilled(plan, layers, self.layout) if on_disk.of_shards else replace(plan, layers=layers)
        return with_staging_buffers(plan)

    def in_memory(self, candidate: Candidate) -> Plan:
        """Return the candidate's plan without rows, as if nothing spilled."""
        base = self._placement(candidate).base
        compute = replace(base.compute, loss_chunk_tokens=self._chunk_tokens(candidate))
        return _changed(base, layers=self._layers_in_memory(candidate), compute=compute)

    def device_bytes(self, candidate: Candidate) -> int:
        """Return all bytes of device memory that the candidate's plan takes."""
        rows, placement = self._activation_rows(candidate), self._placement(candidate)
        num_bytes = rows.num_bytes + placement.num_bytes
        if waiting := candidate.hbm_layers | placement.deferred:
            num_bytes += waiting_row(placement.base, self.layout, rows, waiting, placement.deferred)[0]
        return num_bytes

    def least_device_bytes(self, candidate: Candidate) -> int:
        """Return the device bytes that remain with no layers on the device and no slots."""
        return self._activation_rows(candidate).num_bytes

    @cached_by(_same_room({}))
    def host_room(self, candidate: Candidate) -> int:
        """Return a number that is above 0 if the candidate has room on the host and on disk.

        If the disk overflows, it is minus the bytes beyond the limit of the disk. Else it is the spare bytes of host
        memory, plus one.
        """
        plan = self.without_rows(candidate)
        plan = _changed(plan, memory_items=self._host_and_disk_items(candidate, plan))
        return -beyond_disk(plan) or self._spare_ram(candidate, plan) + 1

    def likely_room(self, candidate: Candidate) -> int:
        """Return a cheaper estimate of `host_room`: on a large disk as if everything was spilled that may be."""
        spill, missing = self.machine.spill, self.missing_ram(candidate)
        if missing > 0 and spill is not None:
            most = self._spillable(candidate).most
            if PAGES * most.num_bytes <= spill.limit_bytes:
                return most.gain - missing + 1
        return self.host_room(candidate)

    @cached_by(_same_room({}))
    def spilled(self, candidate: Candidate) -> LayersOnDisk:
        """Return what of the candidate's plan is on disk: as much as host memory is too small for."""
        if self.machine.spill is None or (missing := self.missing_ram(candidate)) <= 0:
            return NOTHING
        return self._spillable(candidate).choice(missing, candidate.spill_first)

    @cached_by(_same_room(NO_DISK))
    def missing_ram(self, candidate: Candidate) -> int:
        """Return the bytes of host memory that are missing with nothing on disk; negative if there is room."""
        plan = _changed(self.in_memory(candidate), memory_items=self._host_items_in_memory(candidate))
        return -self._spare_ram(candidate, plan)

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of layers that are blocks or parts of blocks."""
        return sum(layer.kind is LayerKind.BLOCK for layer in self.structure.layers)

    @cached_property
    def resident_bytes(self) -> tuple[int, ...]:
        """Return the device bytes of each layer if it lives there."""
        return tuple(resident_bytes(self.request.precision, layer) for layer in self.layout.layers)

    @cached_by(_same_host_bytes(ANY_SPILL_ORDER))
    def _spillable(self, candidate: Candidate) -> Spillable:
        plan = self.in_memory(candidate)
        return Spillable(plan, self.structure, self.layout, activations=candidate.spills_activations)

    def _spare_ram(self, candidate: Candidate, plan: Plan) -> int:
        """Return the spare bytes of host memory. The rows of `plan` are those of host memory and disk only."""
        return spare_ram(plan) - (self.device_bytes(candidate) if self.machine.device == "cpu" else 0)

    def _host_and_disk_items(self, candidate: Candidate, plan: Plan) -> tuple[MemoryItem, ...]:
        if any(self.spilled(candidate)):
            return (*host_memory_items(plan, self.layout), *disk_memory_items(plan, self.layout))
        return self._host_items_in_memory(candidate)

    @cached_by(_same_host_bytes({}))
    def _host_items_in_memory(self, candidate: Candidate) -> tuple[MemoryItem, ...]:
        return tuple(host_memory_items(self.in_memory(candidate), self.layout))

    @cached_by(_always(ALL_KEPT | NO_DISK | {"boundaries": Tier.HBM, "segment": 1}))
    def _placement(self, candidate: Candidate) -> _Placement:
        gradients = GradientPlacement(self.structure, self.layout, self.request, candidate)
        base = base_plan(self.structure, self.layout, self.machine, self.request, candidate, gradients)
        slots = sum(num_bytes for num_bytes, _ in slot_rows(base).values())
        muon = muon_row(base, self.layout)[0] if self.layout.with_muon else 0
        resident = sum(self.resident_bytes[i] for i in candidate.hbm_layers)
        return _Placement(base, slots + muon + resident, gradients.deferred)

    @cached_by(_always(ANYWHERE))
    def _activation_rows(self, candidate: Candidate) -> ActivationRows:
        """Return the rows of activations, the same wherever gradients are and whichever layers live on the device."""
        plan = self.in_memory(candidate)
        return activation_rows(plan, self.structure, self.layout, self.activations, self.request.objective)

    @cached_by(_always(ANYWHERE | BLOCKS_ALIKE))
    def _chunk_tokens(self, candidate: Candidate) -> int:
        """Return the tokens in a chunk of the loss.

        They do not depend on how many layers keep more, so keeping more never makes the loss slower.
        """
        plan = _changed(self._placement(candidate).base, layers=self._layers_in_memory(candidate))
        held = bytes_held_during_loss(plan, self.activations)
        backward = max(backward_bytes_by_layer(plan, self.layout, self.activations))
        return chunk_tokens(
            plan, self.structure, self.layout, held=held, backward=backward,
            objective=self.request.objective, small=self.request.small_logits,
        )  # fmt: skip

    def _layers_in_memory(self, candidate: Candidate) -> tuple[LayerPlan, ...]:
        return self._layers.of(candidate, self._placement(candidate).deferred)

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


PLAN_FIELDS = tuple(f.name for f in fields(Plan))


def _changed(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with these fields changed, as `dataclasses.replace` does in three times the time."""
    values, made = vars(plan), object.__new__(Plan)
    vars(made).update({name: values[name] for name in PLAN_FIELDS}, **changes)
    return made


def _with_copies(plan: Plan) -> Plan:
    """Return the plan with memory for copies that saves make: up to half of the RAM that the plan leaves."""
    num_bytes = max(0, min(plan.updated_bytes // plan.hosts.num_hosts, spare_ram(plan) // 2))
    row = MemoryItem(Tier.HOST, "copies for saves", num_bytes, "up to half of the spare RAM")
    on_device = sum(layer.num_trained for layer in plan.layers if layer.updated_by == "gpu")
    device_bytes = num_bytes * on_device // plan.num_trained
    return replace(
        plan,
        memory_items=(*plan.memory_items, row),
        saves=replace(plan.saves, copy_bytes=num_bytes, device_copy_bytes=device_bytes),
    )


def with_uploads(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> Plan:
    """Return the plan with its uploads per step, and with the bytes of working copies read from disk for them."""
    order = plan.visits(structure.without_backward)
    loads = residency_of(order, structure, layout, plan).loads
    num_bytes = read_bytes(plan, layout, (load.fragment for load in loads))
    return replace(
        plan,
        slots=replace(plan.slots, num_uploads=len(loads)),
        disk=replace(plan.disk, weight_read_bytes=num_bytes),
    )
