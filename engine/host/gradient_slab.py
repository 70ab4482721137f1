"""Allocates leases in the slab, the host memory where gradients and Muon's directions wait for their update."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set

import torch

from megatrain_ray.engine.host.interfaces import Lease
from megatrain_ray.engine.layout.flat_layout import starts_of
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import CapacityError


def held_slab_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the bytes that the slab of gradients takes.

    They are those of the plan, or fewer if host memory is aliased and the slab has room for all layers.
    """
    needed = sum(layout.gradient_bytes(plan.gradients.slab_itemsize, plan.never_in_slab))
    if layout.aliased_size is None or plan.gradients.slab_bytes < needed:
        return plan.gradients.slab_bytes
    return min(plan.gradients.slab_bytes, layout.aliased_size * plan.gradients.slab_itemsize)


class Slab(ABC):
    """Returns leases in a slab. Event loop only.

    A lease is released when every shard has applied the update or stored the gradient.
    """

    def __init__(self, slab: torch.Tensor, sizes: Sequence[int], check: Callable[[], None], start: int = 0) -> None:
        """Return leases in `slab` (1-D uint8).

        sizes: bytes of each layer.
        check: raises if waiting has become pointless.
        start: added to every lease's first byte, so that leases count from there.
        """
        self._slab = slab
        self._sizes = sizes
        self._check = check
        self._first = start
        self._changed = asyncio.Condition()

    async def lease(self, layer: int, update: int = 0) -> Lease:
        """Wait for the layer's lease of an update. Only a follower needs the update."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._place(layer, update) is not None)
            start = self._place(layer, update)
            assert start is not None
            self._hold(layer, start)
        return Lease(layer, self._first + start, self._slab[start : start + self._sizes[layer]])

    async def wake(self) -> None:
        """Make every waiting caller test its condition again, and `check` with it."""
        async with self._changed:
            self._changed.notify_all()

    @abstractmethod
    def _place(self, layer: int, update: int) -> int | None:
        """Return the byte at which the layer's lease may start, or None if it must still wait."""

    @abstractmethod
    def _hold(self, layer: int, start: int) -> None:
        """Note that the layer has a lease from byte `start` on."""


class GradientSlab(Slab):
    """Chooses where leases lie.

    Layers that stay in the slab have fixed places. After these, each layer that only passes through gets the first gap
    that is large enough. If the slab has room for all layers, each of them has a fixed place. If clipped gradients wait
    here for their scale, the slab must hold all of them, so they stay.
    """

    def __init__(
        self, slab: torch.Tensor, sizes: Sequence[int], check: Callable[[], None] = lambda: None, start: int = 0, *,
        passing: Set[int] | None = None, aliased: bool = False,
    ) -> None:  # fmt: skip
        """Divide the slab into fixed places and the room for layers that pass through.

        slab, sizes, check, start: as for every Slab.
        passing: layers that only pass through; None: all.
        aliased: layers have places as in a slab for all of them, but take the same memory in turn.

        Raises CapacityError unless the layers that stay and the largest layer that passes fit together.
        """
        super().__init__(slab, sizes, check, start)
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
        self._held: dict[int, int] = {}  # by layer: first byte of its lease

    async def release(self, layer: int) -> None:
        async with self._changed:
            del self._held[layer]
            self._changed.notify_all()

    def _hold(self, layer: int, start: int) -> None:
        self._held[layer] = start

    def _place(self, layer: int, update: int) -> int | None:
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


class FollowerSlab(Slab):
    """Returns the leases of a rank that is not the first of its host.

    The first rank chooses where leases lie, publishes it in signal words, and releases them.
    """

    def __init__(
        self, slab: torch.Tensor, sizes: Sequence[int], placed_at: Callable[[int, int], int | None],
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Follow the first rank's leases in `slab`.

        slab: everything in which leases count, 1-D uint8.
        sizes, check: as for the first rank's GradientSlab.
        placed_at: returns where a layer's lease of an update begins, or None while that is not published.
        """
        super().__init__(slab, sizes, check)
        self._placed_at = placed_at

    def _place(self, layer: int, update: int) -> int | None:
        self._check()
        return self._placed_at(layer, update)

    def _hold(self, layer: int, start: int) -> None:
        pass  # the first rank keeps account
