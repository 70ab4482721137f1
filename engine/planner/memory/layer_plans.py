"""Makes the layers of a candidate's plan: where each one's tensors are, and what it keeps for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.device_bytes import kept_bytes
from megatrain_ray.engine.planner.memory.gradient_placement import GradientPlacement
from megatrain_ray.engine.planner.memory.spill_choice import NOTHING, LayersOnDisk
from megatrain_ray.engine.planner.request import Candidate, Request, SpillFirst

Layers = tuple[LayerPlan, ...]


@dataclass(frozen=True)
class LayerPlanBuilder:
    """Makes the layers of all candidates of one request; results that many candidates share are made once."""

    structure: ModelStructure
    layout: ModelLayout
    activations: ActivationBytes
    request: Request
    whole: dict[tuple[Candidate, LayersOnDisk], Layers] = field(default_factory=dict)
    single: dict[Candidate, dict[tuple[int | bool, ...], LayerPlan]] = field(default_factory=dict)
    different: dict[tuple[object, ...], LayerPlan] = field(default_factory=dict)  # by layer and its _LayerPlacement

    def of(self, candidate: Candidate, on_disk: LayersOnDisk = NOTHING) -> Layers:
        order = LoopOrder.MICRO_BATCHES_OUTER
        alike = replace(
            candidate,
            order=order,
            num_block_slots=0,
            num_edge_slots=0,
            sums=Tier.HBM,
            spills_activations=False,
            spill_first=SpillFirst.LEAST,
        )
        if (alike, on_disk) not in self.whole:
            self.whole[alike, on_disk] = self._all(alike, on_disk)
        return self.whole[alike, on_disk]

    def _all(self, candidate: Candidate, on_disk: LayersOnDisk) -> Layers:
        ways = _LayerPolicy(self, candidate)
        # The key of each layer below holds what these fields decide.
        alike = replace(
            candidate, gradients=Tier.HOST, num_waiting=0, hbm_layers=frozenset(), num_tail_blocks=0, num_staying=0
        )
        known, layers = self.single.setdefault(alike, {}), []
        for i in range(len(self.layout.layers)):
            key = (*ways.of(i), *[i in of_kind for of_kind in on_disk])
            layer = known.get(key)
            if layer is None:
                layer = known[key] = self._layer(i, ways.choices(i, on_disk))
            layers.append(layer)
        return tuple(layers)

    def _layer(self, index: int, choices: _LayerPlacement) -> LayerPlan:
        if (index, choices) not in self.different:
            self.different[index, choices] = self._make_layer(index, choices)
        return self.different[index, choices]

    def _make_layer(self, index: int, choices: _LayerPlacement) -> LayerPlan:
        layer = self.layout.layers[index]
        on_device = choices.weights is Tier.HBM
        plan = LayerPlan(
            name=layer.name,
            num_parameters=layer.logical_size,
            num_trained=layer.num_trained,
            num_muon=layer.num_muon,
            num_fragments=len(layer.fragments),
            weights=choices.weights,
            state=choices.state,
            gradients=choices.gradients,
            boundary=choices.boundary,
            boundary_bytes=self.activations.boundary[index],
            activations=choices.activations,
            compiled=choices.compiled,
            activation_budget=choices.budget,
            updated_by=("gpu" if on_device else "cpu") if layer.num_trained else "nobody",
        )
        kept = 0 if choices.kept is Tier.HBM else kept_bytes(self.activations, index, plan)
        part = self.structure.layers[index].part
        later = part.later if part else 0
        return replace(plan, kept=choices.kept, kept_bytes=kept, kept_later=later) if kept else plan


class _LayerPlacement(NamedTuple):
    """Holds everything that a plan decides about a layer."""

    weights: Tier
    state: Tier
    gradients: Tier
    boundary: Tier | None
    activations: ActivationPolicy
    compiled: bool
    budget: float
    kept: Tier


class _LayerPolicy:
    """Decides how one candidate treats each layer."""

    def __init__(self, builder: LayerPlanBuilder, candidate: Candidate) -> None:
        self._layout = builder.layout
        self._activations = builder.activations
        self._is_compiled = builder.request.compiled
        self._candidate = candidate
        self._blocks = frozenset(i for i, x in enumerate(builder.structure.layers) if x.kind is LayerKind.BLOCK)
        self._deferred = GradientPlacement(builder.structure, builder.layout, builder.request, candidate).deferred
        self._first_tail_block = len(builder.layout.layers) - 1 - candidate.num_tail_blocks
        self._offloaded = self._which_are_offloaded()

    def _which_are_offloaded(self) -> range:
        """Return the layers with a backward whose kept activations wait on the host or on disk."""
        if self._candidate.kept is Tier.HBM:
            return range(0)
        first = max(self._first_tail_block, self._layout.lowest_trained)
        return range(first, len(self._layout.layers) - 1 - self._candidate.num_staying)

    def of(self, index: int) -> tuple[int | bool, ...]:
        """Return a key of everything about the layer that decides its plan, apart from what is on disk.

        The key is the layer's index and four flags: it lives on the device; its gradient waits there though the layer
        is on the host; it is one of the last blocks, which keep more; its kept activations are offloaded.
        """
        on_device, is_tail = index in self._candidate.hbm_layers, index >= self._first_tail_block
        return index, on_device, index in self._deferred, is_tail, index in self._offloaded

    def choices(self, index: int, on_disk: LayersOnDisk) -> _LayerPlacement:
        budget = self._budget(index)
        compiled = self._is_compiled and self._activations.has_budget(index, budget)
        tier = Tier.HBM if index in self._candidate.hbm_layers else Tier.HOST
        waits = Tier.HBM if tier is Tier.HBM or index in self._deferred else Tier.HOST
        elsewhere = Tier.NVME if index in on_disk.kept else Tier.HOST
        return _LayerPlacement(
            weights=Tier.NVME if index in on_disk.weights else tier,
            state=Tier.NVME if index in on_disk.state else tier,
            gradients=Tier.NVME if index in on_disk.gradients else waits,
            boundary=Tier.NVME if index in on_disk.boundaries else self._boundary(index),
            activations=ActivationPolicy.KEEP if compiled else self._policy(index),
            compiled=compiled,
            budget=budget if compiled else 1.0,
            kept=elsewhere if index in self._offloaded else Tier.HBM,
        )

    def _boundary(self, index: int) -> Tier | None:
        """Return where the layer's input waits for its backward; None if it is recomputed.

        If nothing is trained before the layer, no gradient flows back to its input, which is then neither offloaded nor
        recomputed.
        """
        a, lowest = self._activations, self._layout.lowest_trained
        in_segment = (index - max(1, lowest)) % self._candidate.segment  # segments begin after the embedding
        if index > lowest and in_segment and a.replayable and a.replayable[index]:
            return None
        leaves = self._candidate.boundaries is Tier.HOST and index > lowest and a.private and a.private[index]
        return Tier.HOST if leaves and a.boundary[index] else Tier.HBM

    def _policy(self, layer: int) -> ActivationPolicy:
        """Return the activation policy of a layer that is not compiled; a compiled layer has its budget.

        Embedding and head have nothing to recompute: the embedding keeps only indices, and the head's loss runs at
        once.
        """
        keeps_all = layer >= self._first_tail_block and self._candidate.tail_budget == 1.0
        return self._candidate.activations if layer in self._blocks and not keeps_all else ActivationPolicy.KEEP

    def _budget(self, layer: int) -> float:
        """Return the activation budget of a layer.

        The last blocks have the larger one: what they keep is released first, and gradients take its place.
        """
        return self._candidate.tail_budget if layer >= self._first_tail_block else self._candidate.activation_budget
