"""The slab: host memory where gradients and Muon's directions wait for their update, handed out by lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set

import torch

from megatrain_ray.engine.host.interfaces import Lease
from megatrain_ray.engine.layout.flat_layout import starts_of
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import CapacityError


def held_slab_bytes(plan: Plan, layout: ModelLayout) -> int:
    """What the gradients' slab takes: as planned, but less where it holds all layers and memory is aliased."""
    needed = sum(layout.gradient_bytes(plan.slab_itemsize, plan.never_in_slab))
    if layout.aliased_size is None or plan.slab_bytes < needed:
        return plan.slab_bytes
    return min(plan.slab_bytes, layout.aliased_size * plan.slab_itemsize)


class SlabPool:
    """Leases of a slab: of layers that stay, each at its own place; behind these of layers that pass, each in the first
    gap that is large enough, or at its own place where there is one for each.

    Event loop only. A lease is released when every shard has its update, or the gradient. Where clipped gradients wait
    here for the scale, the slab must hold all of them: they stay.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        sizes: Sequence[int],
        check: Callable[[], None] = lambda: None,
        start: int = 0,
        *,
        passing: Set[int] | None = None,
        aliased: bool = False,
    ) -> None:
        """`slab`: 1-D uint8. `sizes`: bytes of each layer. `check` raises when waiting has become vain. `start`: where
        leases count from. `passing`: layers that pass; None: all. `aliased`: layers have places as in a slab for all
        of them, the same ones in turn.

        Raises CapacityError when those that stay do not fit, and with them the largest that passes.
        """
        self._check = check
        self._slab = slab
        self._first = start
        self._sizes = sizes
        layers = range(len(sizes))
        has_all = aliased or slab.nbytes >= sum(sizes)
        passes = frozenset() if has_all else frozenset(layers) if passing is None else passing
        staying = [0 if layer in passes else sizes[layer] for layer in layers]
        starts = starts_of(staying, slab.nbytes if aliased else None)
        self._places = {layer: starts[layer] for layer in layers if layer not in passes}
        self._stop = sum(staying)
        needed = max(sizes) if has_all else self._stop + max((sizes[layer] for layer in passes), default=0)
        if slab.nbytes < needed:
            raise CapacityError(f"the slab has {slab.nbytes} bytes, what stays and the largest layer need {needed}")
        self._held: dict[int, int] = {}  # where each lease starts
        self._changed = asyncio.Condition()

    async def lease(self, layer: int) -> Lease:
        async with self._changed:
            await self._changed.wait_for(lambda: self._place(layer) is not None)
            start = self._place(layer)
            assert start is not None
            self._held[layer] = start
        return Lease(layer, self._first + start, self._slab[start : start + self._sizes[layer]])

    async def release(self, layer: int) -> None:
        async with self._changed:
            del self._held[layer]
            self._changed.notify_all()

    async def wake(self) -> None:
        """Makes whoever waits look and check again."""
        async with self._changed:
            self._changed.notify_all()

    def _place(self, layer: int) -> int | None:
        """Where the layer's lease may start; None while there is no room."""
        self._check()
        if layer in self._held:
            return None
        place = self._places.get(layer)
        return self._gap(self._sizes[layer]) if place is None else place

    def _gap(self, size: int) -> int | None:
        end = self._stop
        passing = (item for item in self._held.items() if item[0] not in self._places)
        for start, held in sorted((start, layer) for layer, start in passing):
            if start - end >= size:
                return end
            end = start + self._sizes[held]
        return end if self._slab.nbytes - end >= size else None


class FollowedSlab:
    """The slab of a rank that is not the first: its leases are where the first one's are, which says so in signal
    words, and lets go of them. Event loop only."""

    def __init__(
        self,
        slab: torch.Tensor,
        sizes: Sequence[int],
        placed_at: Callable[[int, int], int | None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`slab`: all that leases count in. `sizes` and `check` as for the first one's. `placed_at`: where a layer's
        lease of an update is, None while nobody has said so."""
        self._slab = slab
        self._sizes = sizes
        self._placed_at = placed_at
        self._check = check
        self._changed = asyncio.Condition()

    async def lease(self, layer: int, update: int) -> Lease:
        async with self._changed:
            await self._changed.wait_for(lambda: self._start(layer, update) is not None)
        start = self._start(layer, update)
        assert start is not None
        return Lease(layer, start, self._slab[start : start + self._sizes[layer]])

    async def wake(self) -> None:
        """Makes whoever waits look and check again."""
        async with self._changed:
            self._changed.notify_all()

    def _start(self, layer: int, update: int) -> int | None:
        self._check()
        return self._placed_at(layer, update)
