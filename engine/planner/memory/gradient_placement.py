"""Where a plan lets gradients be: as sums, as what leaves, and while they wait for their update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.optimizer.matrix_parts import largest_part
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Candidate, Request


@dataclass(frozen=True)
class GradientPlaces:
    """Of one candidate. Sizes in bytes."""

    structure: ModelStructure
    layout: ModelLayout
    request: Request
    candidate: Candidate

    @cached_property
    def sums(self) -> torch.dtype:
        """Of sums over micro-batches; with one micro-batch of what autograd makes."""
        return torch.float32 if self.request.sums_several else self.request.precision.working_dtype

    @cached_property
    def wire(self) -> torch.dtype:
        """Of what leaves the device."""
        return torch.bfloat16 if self.request.round_gradients else self.sums

    def wait_on_device(self, index: int) -> bool:
        """Whether the layer's complete gradient does."""
        return index in self.candidate.hbm_layers or index in self.late

    @cached_property
    def late(self) -> frozenset[int]:
        """Layers on the host whose gradients leave when all are complete. What leaves rounded, and what Muon trains,
        leaves as soon as it is complete."""
        if not self.request.clip or self.wire is not self.sums or self.layout.with_muon:
            return frozenset()
        on_host = [i for i in self.layout.updated if i not in self.candidate.hbm_layers]
        return frozenset(on_host if self.candidate.gradients is Tier.HBM else on_host[: self.candidate.num_waiting])

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Regions of sums."""
        if self.candidate.sums is Tier.HOST:
            return self._ring(self.layout.updated, self.sums, 3)  # one arrives, one is added to, one leaves
        sizes = self._sizes(self._leaving, self.sums)
        if self.request.num_micro_batches > 1 and self.candidate.order is LoopOrder.MICRO_BATCHES_OUTER:
            return tuple(reversed(sizes))
        if self.wire is not self.sums:  # what leaves is the copy: a sum's region is free as soon as that is made
            return (max(sizes),) if sizes else ()
        return self._ring(self._leaving, self.sums, 2)

    @property
    def leaving_slot_bytes(self) -> tuple[int, ...]:
        """Regions of rounded sums. With layers outermost one has left long before all micro-batches of the next layer
        are done."""
        count = 1 if self.candidate.order is LoopOrder.LAYERS_OUTER else 2
        return () if self.wire is self.sums else self._ring(self._leaving, self.wire, count)

    def muon_slot_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Two, so that what is made of a layer overlaps with what moves for its neighbours; each for the largest part
        that a GPU has of a layer."""
        num_gpus = self.request.num_gpus
        sizes = [largest_part(self.layout.layers[i], num_gpus) * itemsize for i in self.layout.with_muon]
        return (max(sizes),) * min(2, len(sizes)) if sizes else ()

    @property
    def slab_bytes(self) -> int:
        """On the host."""
        if self.candidate.sums is Tier.HOST:
            return sum(self._shares(self.layout.updated, self.sums))
        on_host = (i for i in self.layout.updated if i not in self.candidate.hbm_layers)
        late = self._shares([i for i in on_host if self.wait_on_device(i)], self.wire)
        sizes = self._shares(self._leaving, self.wire)
        return (sum(sizes) if self.request.clip else in_flight(sizes)) + in_flight(late)

    @cached_property
    def _leaving(self) -> list[int]:
        """Layers whose gradients leave the device when they are complete, in the order of a forward."""
        return [i for i in self.layout.updated if not self.wait_on_device(i)]

    def _sizes(self, layers: Sequence[int], dtype: torch.dtype) -> list[int]:
        return [self.layout.layers[i].trained.size * dtype.itemsize for i in layers]

    def _shares(self, layers: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Of these sizes what a host has."""
        return [self.layout.shares[i].trained.size * dtype.itemsize for i in layers]

    def _ring(self, layers: Sequence[int], dtype: torch.dtype, count: int) -> tuple[int, ...]:
        """`count` regions that blocks take in turn, and one for embedding and head, between whose gradients there is
        a forward or a backward; they have no region to themselves where a block's would do."""
        blocks, edges = (
            [i for i in layers if (self.structure.layers[i].kind is LayerKind.BLOCK) is of_blocks]
            for of_blocks in (True, False)
        )
        of_block, of_edge = (max(self._sizes(some, dtype), default=0) for some in (blocks, edges))
        larger = (of_edge,) if of_edge > of_block else ()
        return (*larger, *(of_block,) * min(count, len(layers) - len(larger) if of_block else 0))


def in_flight(sizes: Sequence[int]) -> int:
    """Room for the largest, and for four like most of them; or for all where that is less."""
    return min(sum(sizes), max(*sizes, 4 * sorted(sizes)[len(sizes) // 2])) if sizes else 0
