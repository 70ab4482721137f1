"""Decides where gradients are while they are summed and offloaded: on device or host (disk: spill_choice.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.optimizer.muon import largest_part
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Candidate, Request


@dataclass(frozen=True)
class GradientPlacement:
    """Computes where the gradients of one candidate are, and how large the regions for them are, in bytes."""

    structure: ModelStructure
    layout: ModelLayout
    request: Request
    candidate: Candidate

    @cached_property
    def sums(self) -> torch.dtype:
        """Return the dtype of sums over micro-batches.

        It is FP32; with only one micro-batch over all GPUs it is the dtype of the gradient that autograd makes.
        """
        return torch.float32 if self.request.sums_several else self.request.precision.working_dtype

    @cached_property
    def wire(self) -> torch.dtype:
        """Return the dtype in which gradients leave the device."""
        return torch.bfloat16 if self.request.round_gradients else self.sums

    def wait_on_device(self, index: int) -> bool:
        """Return whether the layer's complete gradient waits on the device for its update."""
        return index in self.candidate.hbm_layers or index in self.deferred

    @cached_property
    def deferred(self) -> frozenset[int]:
        """Return the host layers whose gradients leave the device only when all gradients are complete.

        There are none without clipping, with gradients that leave rounded, or if Muon trains anything: those leave as
        soon as they are complete.
        """
        if not self.request.clip or self.wire is not self.sums or self.layout.with_muon:
            return frozenset()
        on_host = [i for i in self.layout.updated if i not in self.candidate.hbm_layers]
        return frozenset(on_host if self.candidate.gradients is Tier.HBM else on_host[: self.candidate.num_waiting])

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each region on the device that gradients are summed in."""
        if self.candidate.sums is Tier.HOST:
            return self._ring(self.layout.updated, self.sums, 3)  # one is reloaded, one is added to, one leaves
        sizes = self._sizes(self._leaving, self.sums)
        if self.request.num_micro_batches > 1 and self.candidate.order is LoopOrder.MICRO_BATCHES_OUTER:
            return tuple(reversed(sizes))
        if self.wire is not self.sums:  # a rounded copy leaves: the region of the sum is free once it is made
            return (max(sizes),) if sizes else ()
        return self._ring(self._leaving, self.sums, 2)

    @property
    def leaving_slot_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each region that rounded sums leave from; empty if nothing is rounded.

        With layers outermost one region is enough: it is empty again long before all micro-batches of the next layer
        are done.
        """
        count = 1 if self.candidate.order is LoopOrder.LAYERS_OUTER else 2
        return () if self.wire is self.sums else self._ring(self._leaving, self.wire, count)

    def muon_slot_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes of each region for Muon's momenta, or for its directions; empty if Muon trains nothing.

        There are two regions, so that the work on one layer overlaps with the transfers of its neighbours. Each is as
        large as the largest part of a layer that a GPU has.

        itemsize: bytes of an element.
        """
        num_gpus = self.request.num_gpus
        sizes = [largest_part(self.layout.layers[i], num_gpus) * itemsize for i in self.layout.with_muon]
        return (max(sizes),) * min(2, len(sizes)) if sizes else ()

    @property
    def slab_bytes(self) -> int:
        """Return the bytes of the slab: host memory for gradients."""
        if self.candidate.sums is Tier.HOST:
            return sum(self._shares(self.layout.updated, self.sums))
        on_host = (i for i in self.layout.updated if i not in self.candidate.hbm_layers)
        deferred = self._shares([i for i in on_host if self.wait_on_device(i)], self.wire)
        sizes = self._shares(self._leaving, self.wire)
        return (sum(sizes) if self.request.clip else in_flight(sizes)) + in_flight(deferred)

    @cached_property
    def _leaving(self) -> list[int]:
        """Return the layers whose gradients leave the device as soon as they are complete, in forward order."""
        return [i for i in self.layout.updated if not self.wait_on_device(i)]

    def _sizes(self, layers: Sequence[int], dtype: torch.dtype) -> list[int]:
        return [self.layout.layers[i].trained.size * dtype.itemsize for i in layers]

    def _shares(self, layers: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the bytes of each layer's gradient that one host has."""
        return [self.layout.shares[i].trained.size * dtype.itemsize for i in layers]

    def _ring(self, layers: Sequence[int], dtype: torch.dtype, count: int) -> tuple[int, ...]:
        """Return the bytes of `count` regions that blocks take in turn, and of one region for embedding and head.

        One is enough for embedding and head, because there is a forward or a backward between their gradients. They
        have no region of their own if that of a block is large enough.
        """
        blocks, edges = (
            [i for i in layers if (self.structure.layers[i].kind is LayerKind.BLOCK) is of_blocks]
            for of_blocks in (True, False)
        )
        of_block, of_edge = (max(self._sizes(some, dtype), default=0) for some in (blocks, edges))
        larger = (of_edge,) if of_edge > of_block else ()
        return (*larger, *(of_block,) * min(count, len(layers) - len(larger) if of_block else 0))


def in_flight(sizes: Sequence[int]) -> int:
    """Return the slab bytes for gradients of these sizes that pass through the slab.

    There is room for the largest one and at least for four of the median size, but never for more than all together.
    """
    return min(sum(sizes), max(*sizes, 4 * sorted(sizes)[len(sizes) // 2])) if sizes else 0
