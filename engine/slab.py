"""The slab: host memory where gradients and Muon's directions wait for their update, handed out by lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from megatrain_ray.engine.flat_layout import starts_of
from megatrain_ray.engine.seams import Lease
from megatrain_ray.errors import CapacityError


class SlabPool:
    """Leases of a slab that holds what waits of every layer, each at its own place; or of a smaller one, each in the
    first gap that is large enough.

    Event loop only. A lease is released when every shard has its update. Where clipped gradients wait here for the
    scale, the slab must hold all of them.
    """

    def __init__(
        self, slab: torch.Tensor, sizes: Sequence[int], check: Callable[[], None] = lambda: None, start: int = 0
    ) -> None:
        """`slab`: 1-D uint8. `sizes`: bytes of each layer. `check` raises when waiting has become vain. `start`: where
        leases count from.

        Raises CapacityError when the largest layer does not fit.
        """
        self._check = check
        self._slab = slab
        self._first = start
        self._sizes = sizes
        if slab.nbytes < max(sizes):
            raise CapacityError(f"the slab has {slab.nbytes} bytes, the largest layer needs {max(sizes)}")
        self._places = starts_of(sizes) if slab.nbytes >= sum(sizes) else None
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
        return self._places[layer] if self._places else self._gap(self._sizes[layer])

    def _gap(self, size: int) -> int | None:
        end = 0
        for start, held in sorted((start, layer) for layer, start in self._held.items()):
            if start - end >= size:
                return end
            end = start + self._sizes[held]
        return end if self._slab.nbytes - end >= size else None
