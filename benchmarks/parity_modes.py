"""Defines the modes in which parity is shown, builds their plans, and checks each plan against its mode."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder, dtype_name
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.limits import fits
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.engine.planner.search.candidates import candidates
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.machine import machine_of
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import open_model
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.profiling.profiles import with_profile
from tests.support.candidate_plans import build_plan

SEVERAL = 4  # micro-batches


@dataclass(frozen=True)
class Mode:
    """Describes how a step runs.

    about: the mode in words.
    budget: activation budget of compiled layers. Where none is compiled, 1.0 keeps activations and 0.0 recomputes them.
    sums: where sums of gradients over micro-batches are kept.
    hbm_share: share of the layers that live on the device, counted from the embedding on.
    tail_budget: activation budget of the second half of the blocks; None: as `budget`.
    gradients: where complete gradients of the other layers wait for the clip scale.
    boundaries: where inputs of layers are kept until their backward.
    kept: where the activations that the late blocks keep are held.
    captured: a step is one CUDA graph.
    is_limited: only the split is given, and a device without a byte more than the smallest plan needs; the product
        chooses the rest.
    """

    about: str
    num_micro_batches: int = 1
    order: LoopOrder = LoopOrder.MICRO_BATCHES_OUTER
    budget: float = 1.0
    sums: Tier = Tier.HBM
    hbm_share: float = 0.0
    tail_budget: float | None = None
    gradients: Tier = Tier.HOST
    boundaries: Tier = Tier.HBM
    kept: Tier = Tier.HBM
    compiled: bool = True
    clips: bool = True
    captured: bool = False
    is_limited: bool = False

    def matches(self, candidate: Candidate) -> bool:
        """Return whether the candidate is a way to run such a step, wherever it places layers."""
        c = candidate
        tiers = c.sums, c.gradients, c.boundaries
        if (c.order, *tiers) != (self.order, self.sums, self.gradients, self.boundaries):
            return False
        if self.compiled:
            return c.activation_budget == self.budget
        return (c.activations is ActivationPolicy.RECOMPUTE) == (self.budget == 0.0)


MODES: Mapping[str, Mode] = {
    "hbm": Mode("all layers live in HBM; activations kept", hbm_share=1.0),
    "half_hbm": Mode(
        "half of the layers live in HBM, the others stream; gradients of these wait in HBM; budget 0.8, late blocks 1",
        budget=0.8, tail_budget=1.0, hbm_share=0.5, gradients=Tier.HBM,
    ),
    "captured": Mode("as hbm, a step is one CUDA graph", hbm_share=1.0, captured=True),
    "captured_layers_outer": Mode(
        "as captured, 4 micro-batches, layers outermost; budget 0.2", SEVERAL, LoopOrder.LAYERS_OUTER, 0.2,
        hbm_share=1.0, captured=True,
    ),
    "streamed": Mode("no layer lives in HBM; activations kept"),
    "no_clip": Mode("as streamed, without clipping: updates run under the backward", clips=False),
    "micro_batches_outer": Mode("4 micro-batches, outermost; budget 0.6", SEVERAL, budget=0.6),
    "micro_batches_hbm": Mode("4 micro-batches, all layers in HBM; budget 0.4", SEVERAL, budget=0.4, hbm_share=1.0),
    "late_gradients": Mode(
        "4 micro-batches, outermost, half of the layers in HBM; gradients of the others wait there too; budget 0.4",
        SEVERAL, budget=0.4, hbm_share=0.5, gradients=Tier.HBM,
    ),
    "layers_outer": Mode("4 micro-batches, layers outermost; budget 0.2", SEVERAL, LoopOrder.LAYERS_OUTER, 0.2),
    "host_sums": Mode("4 micro-batches, sums wait on the host; budget 0", SEVERAL, budget=0.0, sums=Tier.HOST),
    "host_boundaries": Mode(
        "4 micro-batches, layers outermost, what enters layers waits on the host; budget 0",
        SEVERAL, LoopOrder.LAYERS_OUTER, budget=0.0, boundaries=Tier.HOST,
    ),
    "host_kept": Mode(
        "4 micro-batches, layers outermost; what late blocks keep waits on the host; budget 0.4, late blocks 1",
        SEVERAL, LoopOrder.LAYERS_OUTER, budget=0.4, tail_budget=1.0, kept=Tier.HOST,
    ),
    "limited": Mode("4 micro-batches, the smallest hbm_limit that any plan fits", SEVERAL, is_limited=True),
    "uncompiled": Mode("as streamed, nothing compiled", compiled=False),
    "recomputed": Mode(
        "4 micro-batches, layers outermost, all recomputed, nothing compiled",
        SEVERAL, LoopOrder.LAYERS_OUTER, 0.0, compiled=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class DrawnWeights:
    """Serves values by name, each 1-D, through the interface of a WeightSource."""

    values: Mapping[str, Tensor]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.values[name][start:stop]


@dataclass(frozen=True)
class DrawnSource(ModelSource):
    """Holds a model source whose weights were drawn once, for all modes and for the plain training."""

    drawn: Mapping[str, Tensor] = field(default_factory=dict)

    def base_weights(self) -> WeightSource:
        return DrawnWeights(self.drawn)


@dataclass(frozen=True)
class Common:
    """Holds what all modes of a configuration share. `activations`: bytes of the activations of one sequence."""

    config: TrainConfig
    source: DrawnSource
    structure: ModelStructure
    activations: ActivationBytes
    machine: Machine

    @staticmethod
    def of(config: TrainConfig, *, compiled: bool) -> Common:
        """Draw the model's first values as a run would, and discover its structure and activations.

        compiled: some modes compile layers.

        Raises ConfigError if train.batch_size cannot be split into SEVERAL equal micro-batches.
        """
        if (config.train.batch_size or 0) % SEVERAL:
            raise ConfigError(f"train.batch_size: {config.train.batch_size} sequences are not {SEVERAL} equal parts")
        source, hardware = open_model(config.model), config.hardware
        dtype = Precision(config.train.precision).working_dtype
        structure, activations = discover(source.factory, dtype, 1, config.data.seq_len, compiled=compiled)
        weights = source.weights()
        owned = [p for layer in structure.layers for p in layer.parameters if p.tied_to is None]
        drawn = {p.name: weights.read(p.name, 0, math.prod(p.shape)) for p in owned}
        machine = machine_of(hardware)
        machine = with_profile(machine, hardware.profile)
        return Common(config, DrawnSource(**vars(source), drawn=drawn), structure, activations, machine)

    def run_spec(self, mode: Mode) -> RunSpec:
        """Return a run in this mode. Raises CapacityError if the mode is limited and no plan fits."""
        batch_size = self.config.train.batch_size or 0
        config = self.config.with_split(batch_size // mode.num_micro_batches, mode.num_micro_batches)
        if not mode.clips:
            config = config.model_copy(update={"train": config.train.model_copy(update={"clip": None})})
        return RunSpec(config, self.source, self.structure, self._plan(config, mode))

    def _plan(self, config: TrainConfig, mode: Mode) -> Plan:
        """Build the plan of the product's first candidate that matches; if the mode is limited, make_plan chooses."""
        request = _request(config, compiled=mode.compiled)
        activations = self.activations.times(request.micro_batch_size)
        if mode.is_limited:
            machine = self._smallest_machine(request, activations)
            return make_plan(self.structure, activations, machine, request)
        candidate = next(filter(mode.matches, candidates(self.structure, request)))
        candidate = candidate._replace(hbm_layers=frozenset(range(self.num_hbm_layers(mode))))
        if mode.tail_budget is not None:
            number = "num_tail_blocks" if mode.kept is Tier.HBM else "num_offloading"
            late = candidate._replace(**{number: self.num_tail_blocks}, tail_budget=mode.tail_budget)
            candidate = late._replace(kept=mode.kept)
        plan = build_plan(self.structure, activations, self.machine, request, candidate)
        return replace(plan, step=replace(plan.step, captured=mode.captured))

    def num_hbm_layers(self, mode: Mode) -> int:
        return round(mode.hbm_share * len(self.structure.layers))

    @property
    def num_tail_blocks(self) -> int:
        return len(_blocks(self.structure)) // 2

    def _smallest_machine(self, request: Request, activations: ActivationBytes) -> Machine:
        """Return the machine with the least device memory that a plan fits into.

        It takes several rounds, because what is needed depends on what there is: the chunks of the loss do, and smaller
        chunks may need more.
        """
        machine = self.machine
        while (needed := self._least_bytes(request, activations, machine)) != machine.hbm_bytes:
            machine = replace(machine, hbm_bytes=needed)
        return machine

    def _least_bytes(self, request: Request, activations: ActivationBytes, machine: Machine) -> int:
        plans = (
            build_plan(self.structure, activations, machine, request, candidate)
            for candidate in candidates(self.structure, request)
        )
        return min(plan.total_bytes(Tier.HBM) for plan in plans)

    def problems(self, mode: Mode, plan: Plan) -> Iterator[str]:
        """Yield a line for each property of the plan that is not what the mode is about."""
        got = summary(plan, self.structure)
        for key, expected in self._expected(mode).items():
            if got[key] != expected:
                yield f"{key}: expected {expected}, the plan has {got[key]}"

    def _expected(self, mode: Mode) -> dict[str, Any]:
        num_blocks = len(_blocks(self.structure))
        expected = {
            "num_micro_batches": mode.num_micro_batches,
            "hbm_layers": self.num_hbm_layers(mode),
            "compiled_layers": num_blocks if mode.compiled else 0,
            "compiled_loss": mode.compiled,
            "update_order": (UpdateOrder.FORWARD if mode.clips else UpdateOrder.BACKWARD).value,
            "captured": mode.captured,
            "fits": True,
        }
        if mode.is_limited:
            return expected | {"layers_that_keep_all": 0, "fills_hbm_limit": True}
        waiting = len(self.structure.layers) - self.num_hbm_layers(mode) if mode.gradients is Tier.HBM else 0
        return expected | {
            "order": mode.order.value,
            "sums": mode.sums.value,
            "gradients_waiting_in_hbm": waiting,
            "boundaries_on_host": num_blocks if mode.boundaries is Tier.HOST else 0,
            "kept_on_host": self.num_tail_blocks if mode.kept is Tier.HOST else 0,
            "activation_budgets": self._budgets(mode) if mode.compiled else {},
            "layers_that_keep_all": self._budgets(mode).get("1.0", 0),
        }

    def _budgets(self, mode: Mode) -> dict[str, int]:
        num_tail_blocks = 0 if mode.tail_budget is None else self.num_tail_blocks
        counts = {str(mode.budget): len(_blocks(self.structure)) - num_tail_blocks}
        return counts | ({str(mode.tail_budget): num_tail_blocks} if num_tail_blocks else {})


def summary(plan: Plan, structure: ModelStructure) -> dict[str, Any]:
    """Return what is checked of a plan, as plain data.

    `activation_budgets` counts the compiled layers of each budget.
    """
    blocks = [plan.layers[i] for i in _blocks(structure)]
    budgets = [layer.activation_budget for layer in blocks if layer.compiled]
    whole = [x for x in blocks if x.activations is ActivationPolicy.KEEP and x.activation_budget == 1.0]
    return {
        "order": plan.step.order.value,
        "micro_batch_size": plan.step.micro_batch_size,
        "num_micro_batches": plan.step.num_micro_batches,
        "sums": plan.gradients.sums.value,
        "gradients_waiting_in_hbm": len(plan.deferred_offload_layers),
        "boundaries_on_host": sum(layer.boundary is Tier.HOST for layer in plan.layers),
        "kept_on_host": sum(layer.kept is Tier.HOST for layer in plan.layers),
        "num_layers": len(plan.layers),
        "hbm_layers": len(plan.hbm_layers),
        "compiled_layers": len(budgets),
        "activation_budgets": dict(Counter(map(str, budgets))),
        "layers_that_keep_all": len(whole),
        "compiled_loss": plan.compute.compiled_loss,
        "captured": plan.step.captured,
        "loss_chunk_tokens": plan.compute.loss_chunk_tokens,
        "update_order": plan.step.update_order.value,
        "gradient_dtype": dtype_name(plan.gradients.offload_dtype),
        "num_slots": len(plan.slots.weights),
        "uploads_per_step": plan.slots.num_uploads,
        "hbm_limit_bytes": plan.limits.hbm_bytes,
        "hbm_bytes": plan.total_bytes(Tier.HBM),
        "host_bytes": plan.total_bytes(Tier.HOST),
        "fits": fits(plan),
        "fills_hbm_limit": plan.total_bytes(Tier.HBM) == plan.limits.hbm_bytes,
    }


def _blocks(structure: ModelStructure) -> Collection[int]:
    return [i for i, layer in enumerate(structure.layers) if layer.kind is LayerKind.BLOCK]


def _request(config: TrainConfig, *, compiled: bool) -> Request:
    """Return the request that `prepare` makes for a dense model with one document a row and a given split."""
    micro_batch_size, num_micro_batches = config.split()
    return Request(
        precision=Precision(config.train.precision),
        round_gradients=False,
        clip=config.train.clip is not None,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        seq_len=config.data.seq_len,
        num_shards=config.hardware.num_shards,
        saves=False,
        compiled=compiled,
    )
