"""The slab: host memory where gradients and Muon's directions wait for their update, handed out by lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from megatrain_ray.engine.layout import starts_of
from megatrain_ray.engine.seams import Lease
from megatrain_ray.errors import CapacityError


class SlabPool:
    """Leases of a slab that holds what waits of every layer, each at its own place, or of a smaller one in equal parts.

    Event loop only. A lease is released when every shard has its update; clipped steps need a slab for all gradients,
    because no update may start before the last gradient's norm is known.
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
        self._own_place = slab.nbytes >= sum(sizes)
        part = max(sizes)
        if slab.nbytes < part:
            raise CapacityError(f"the slab has {slab.nbytes} bytes, the largest layer needs {part}")
        num_parts = len(sizes) if self._own_place else slab.nbytes // part
        self._starts = starts_of(sizes) if self._own_place else ()
        self._free = [i * part for i in range(num_parts)]
        self._held: dict[int, int] = {}
        self._changed = asyncio.Condition()

    async def lease(self, layer: int) -> Lease:
        async with self._changed:
            await self._changed.wait_for(lambda: self._available(layer))
            start = self._starts[layer] if self._own_place else self._free.pop(0)
            self._held[layer] = start
        return Lease(layer, self._first + start, self._slab[start : start + self._sizes[layer]])

    async def release(self, layer: int) -> None:
        async with self._changed:
            start = self._held.pop(layer)
            if not self._own_place:
                self._free.append(start)
            self._changed.notify_all()

    async def wake(self) -> None:
        """Makes whoever waits look and check again."""
        async with self._changed:
            self._changed.notify_all()

    def _available(self, layer: int) -> bool:
        self._check()
        return layer not in self._held and (self._own_place or bool(self._free))
