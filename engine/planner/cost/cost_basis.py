"""Holds what predictions for one model on one machine are made of: layers, their work, the machine's rates. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatrain_ray.engine.device.hardware_profile import HardwareProfile
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes, first_alike
from megatrain_ray.engine.layout.model_layout import ModelLayout, largest_share
from megatrain_ray.engine.model.flops import LayerWork, work_of
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import Residency, residency_of
from megatrain_ray.engine.plan.schedule import LoopOrder, Visit, visits
from megatrain_ray.engine.planner.request import Machine, Request


class KnownPrices(NamedTuple):
    """Caches what plans with equal settings have in common.

    of_layers: seconds of an operation, by its name, the first layers like this one (by work, and by activations),
        whether the layer is compiled, and its activation budget.
    sweeps: seconds of each visit of one micro-batch, by what each layer keeps.
    """

    of_layers: dict[tuple[str, int, int, bool, float], float]
    sweeps: dict[object, tuple[float, ...]]


class Schedule(NamedTuple):
    """Holds the visits of a step, and what is in the slots during each of them."""

    visits: tuple[Visit, ...]
    residency: Residency


@dataclass(frozen=True)
class CostBasis:
    """Holds what all plans of one model on one machine have in common.

    layout: with the plans' number of fragments.
    """

    structure: ModelStructure
    layout: ModelLayout
    work: tuple[LayerWork, ...]
    profile: HardwareProfile
    is_measured: bool  # false: the rates of the profile are built-in ones
    objective_bytes: int  # `ObjectiveBytes.per_logit`
    disk_bytes_per_s: float = math.inf  # reads and writes that run at the same time, both together
    disk_plain_bytes_per_s: float | None = None  # of activations, if the other rate is of packed data: these never are
    scores_in_step: bool = False  # as in `Request`
    scores_first: bool = False  # as in `Request`
    # Cached by the fields that decide: schedules of steps, and prices of layers' operations.
    schedules: dict[object, Schedule] = field(default_factory=dict)
    prices: dict[object, KnownPrices] = field(default_factory=dict)

    def known_prices(self, plan: Plan, activations: ActivationBytes) -> KnownPrices:
        """Return the cache of prices that the plan shares with others of equal step, hosts and types."""
        key = plan.step, plan.compute, plan.precision, plan.gradients.offload_dtype, plan.hosts, activations
        return self.prices.setdefault(key, KnownPrices({}, {}))

    def schedule(self, plan: Plan) -> Schedule:
        """Return the schedule of a step of the plan; what is kept for a backward makes no difference to it."""
        key = (
            plan.step.num_micro_batches,
            plan.step.order,
            plan.precision,
            plan.slots.weights,
            plan.hbm_layers,
            plan.replayed_layers,
        )
        if key not in self.schedules:
            order = plan.visits(self.structure.without_backward)
            self.schedules[key] = Schedule(order, residency_of(order, self.structure, self.layout, plan))
        return self.schedules[key]

    @cached_property
    def rates(self) -> HardwareProfile:
        """Return all rates that prices are made of: the machine's profile, with the disk's rates if there is a disk."""
        if math.isinf(self.disk_bytes_per_s):
            return self.profile
        return replace(
            self.profile,
            disk_bytes_per_s=self.disk_bytes_per_s,
            disk_plain_bytes_per_s=self.disk_plain_bytes_per_s,
        )

    @property
    def activations_per_s(self) -> float:
        """Return the bytes of activations that are read and written per second, both together."""
        return self.disk_plain_bytes_per_s or self.disk_bytes_per_s

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Return for each layer the first layer that does the same work.

        Both take equally long if a plan treats them in the same way.
        """
        kinds = (layer.kind for layer in self.structure.layers)
        sizes = ((x.trained.size, x.num_trained, *(s.shape for s in x.muon_segments)) for x in self.layout.layers)
        return first_alike(zip(kinds, self.work, sizes, strict=True))

    @cached_property
    def one_sweep(self) -> tuple[Visit, ...]:
        """Return the visits of one micro-batch, without replays."""
        return visits(len(self.layout.layers), 1, LoopOrder.LAYERS_OUTER, self.structure.without_backward)


def basis_of(structure: ModelStructure, machine: Machine, request: Request) -> CostBasis:
    """Return what predictions of all plans for a request share."""
    layout = largest_share(structure.layout(request.num_fragments), request.num_hosts)
    work = work_of(structure, request.active_experts, request.sliding_windows)
    spill = machine.spill
    disk = (spill.bytes_per_s, spill.plain_bytes_per_s) if spill else (math.inf, None)
    is_measured = machine.profile is not None
    return CostBasis(
        structure, layout, work, machine.rates, is_measured, request.objective.per_logit, *disk, request.scores_in_step,
        request.scores_first,
    )  # fmt: skip
