"""Makes the layers of a candidate's plan: where each one's tensors are, and what it keeps for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.alike import Alike
from megatrain_ray.engine.planner.memory.spill_choice import NOTHING, LayersOnDisk
from megatrain_ray.engine.planner.memory.work_bytes import kept_bytes
from megatrain_ray.engine.planner.request import Candidate, Request, SpillFirst

Layers = tuple[LayerPlan, ...]
# Values that stand for all values of fields that make no difference to layers.
ANY_STEP: dict[str, Any] = {
    "order": LoopOrder.MICRO_BATCHES_OUTER, "num_block_slots": 0, "num_edge_slots": 0, "sums": Tier.HBM,
    "spills_activations": False, "spill_first": SpillFirst.LEAST,
}  # fmt: skip
# Fields that only decide which layers are in which of the groups of `_LayerPolicy.groups_of`.
ANY_GROUPS: dict[str, Any] = {
    "gradients": Tier.HOST, "num_waiting": 0, "hbm_layers": frozenset(), "num_tail_blocks": 0, "num_offloading": 0
}  # fmt: skip
SAME_LAYERS, SAME_POLICY = Alike(ANY_STEP), Alike(ANY_STEP | ANY_GROUPS)


@dataclass(frozen=True)
class LayerPlanBuilder:
    """Makes the layers of all candidates of one request. A layer that several candidates treat alike is made once."""

    structure: ModelStructure
    layout: ModelLayout
    activations: ActivationBytes
    request: Request
    known: dict[tuple[tuple[Any, ...], LayersOnDisk], Layers] = field(default_factory=dict)
    known_layers: dict[tuple[Any, ...], dict[tuple[int | bool, ...], LayerPlan]] = field(default_factory=dict)

    def of(self, candidate: Candidate, deferred: frozenset[int], on_disk: LayersOnDisk = NOTHING) -> Layers:
        """Return the layers of the candidate's plan.

        deferred: host layers whose gradients wait on the device.
        """
        key = SAME_LAYERS.key(candidate), on_disk
        if key not in self.known:
            policy = _LayerPolicy(self, candidate, deferred, on_disk)
            made, layers = self.known_layers.setdefault(SAME_POLICY.key(candidate), {}), []
            for index in range(len(self.layout.layers)):
                groups = policy.groups_of(index)
                if groups not in made:
                    made[groups] = policy.layer(index)
                layers.append(made[groups])
            self.known[key] = tuple(layers)
        return self.known[key]


class _LayerPolicy:
    """Decides how one candidate treats each layer."""

    def __init__(
        self, builder: LayerPlanBuilder, candidate: Candidate, deferred: frozenset[int], on_disk: LayersOnDisk
    ) -> None:
        self._structure = builder.structure
        self._layout = builder.layout
        self._activations = builder.activations
        self._is_compiled = builder.request.compiled
        self._candidate = candidate
        self._deferred = deferred
        self._on_disk = on_disk
        last = len(builder.layout.layers) - 1
        self._first_tail_block = last - candidate.num_tail_blocks
        idle = self._structure.without_backward
        may_offload = [i for i in range(1, self._first_tail_block) if i not in idle]
        # Layers with a backward whose kept activations wait on the host or on disk.
        self._offloaded = frozenset(spread(may_offload, candidate.num_offloading))

    def groups_of(self, index: int) -> tuple[int | bool, ...]:
        """Return the layer's index, and for each group of layers that are treated differently whether it is in it.

        These are layers on the device, layers whose gradients wait there though they are on the host, the last blocks,
        which keep more, layers that offload what they keep, and layers with something on disk.
        """
        d = self._on_disk
        return (
            index, index in self._candidate.hbm_layers, index in self._deferred, index >= self._first_tail_block,
            index in self._offloaded, index in d.gradients, index in d.state, index in d.weights,
            index in d.boundaries, index in d.kept,
        )  # fmt: skip

    def layer(self, index: int) -> LayerPlan:
        layer, on_disk = self._layout.layers[index], self._on_disk
        on_device = index in self._candidate.hbm_layers
        home = Tier.HBM if on_device else Tier.HOST
        waits = Tier.HBM if index in self._deferred else home
        budget = self._budget(index)
        compiled = self._is_compiled and self._activations.has_budget(index, budget)
        plan = LayerPlan(
            name=layer.name,
            num_parameters=layer.logical_size,
            num_trained=layer.num_trained,
            num_muon=layer.num_muon,
            num_frozen_fp32=layer.num_frozen_fp32,
            num_fragments=len(layer.fragments),
            weights=Tier.NVME if index in on_disk.weights else home,
            state=Tier.NVME if index in on_disk.state else home,
            gradients=Tier.NVME if index in on_disk.gradients else waits,
            boundary=Tier.NVME if index in on_disk.boundaries else self._boundary(index),
            boundary_bytes=self._activations.boundary[index],
            activations=ActivationPolicy.KEEP if compiled else self._policy(index),
            compiled=compiled,
            activation_budget=budget if compiled else 1.0,
            updated_by=("gpu" if on_device else "cpu") if layer.num_trained else "nobody",
        )
        kept = kept_bytes(self._activations, index, plan) if index in self._offloaded else 0
        if not kept:
            return plan
        part, tier = self._structure.layers[index].part, Tier.NVME if index in on_disk.kept else Tier.HOST
        return replace(plan, kept=tier, kept_bytes=kept, kept_later=part.later if part else 0)

    def _boundary(self, index: int) -> Tier | None:
        """Return where the layer's input waits for its backward; None if it is recomputed.

        The input stays on the device if no gradient flows back through it to the layer before.
        """
        a, lowest = self._activations, self._layout.lowest_trained
        has_gradient = index > 0 and not self._structure.without_backward & {index - 1, index}
        in_segment = (index - max(1, lowest)) % self._candidate.segment  # segments begin after the embedding
        if has_gradient and in_segment and a.replayable and a.replayable[index]:
            return None
        leaves = self._candidate.boundaries is Tier.HOST and has_gradient and a.private and a.private[index]
        return Tier.HOST if leaves and a.boundary[index] else Tier.HBM

    def _policy(self, index: int) -> ActivationPolicy:
        """Return the activation policy of a layer that is not compiled; a compiled layer has its budget.

        Embedding and head have nothing to recompute: the embedding keeps only indices, and the head's loss runs at
        once.
        """
        keeps_all = self._keeps_more(index) and self._candidate.tail_budget == 1.0
        is_block = self._structure.layers[index].kind is LayerKind.BLOCK
        return self._candidate.activations if is_block and not keeps_all else ActivationPolicy.KEEP

    def _budget(self, index: int) -> float:
        """Return the layer's activation budget: the last blocks, and those that offload, have the larger one.

        What the last blocks keep is released first, and gradients take its place.
        """
        return self._candidate.tail_budget if self._keeps_more(index) else self._candidate.activation_budget

    def _keeps_more(self, index: int) -> bool:
        return index >= self._first_tail_block or index in self._offloaded


def spread(indices: Sequence[int], count: int) -> list[int]:
    """Return `count` of these indices, or all if there are fewer, at distances as equal as can be, the last included.

    Offloads then run under the forwards of the layers between.
    """
    num = len(indices)
    return [index for k, index in enumerate(indices) if (k + 1) * count // num > k * count // num]
