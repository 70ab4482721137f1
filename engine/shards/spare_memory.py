"""SpareMemory: RAM for copies of layers, taken once and used by one save after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import round_up
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena import Arena
from megatrain_ray.io.arenas.arena_holder import ArenaHolder

PAGE_BYTES = 4096
POPULATE_THREADS = 4  # beside what starts or computes meanwhile


class SpareMemory:
    """Regions for as many layers as a budget holds. Not for several threads at the same time, but for `populate`."""

    def __init__(self, layer_bytes: Sequence[int], budget_bytes: int) -> None:
        """`layer_bytes`: of each layer's copy, in the order in which layers will need one."""
        spans, total = [], 0
        for num_bytes in layer_bytes:
            if num_bytes and total + round_up(num_bytes, PAGE_BYTES) <= budget_bytes:
                spans.append((total, num_bytes))
                total += round_up(num_bytes, PAGE_BYTES)
        self._arena = _new_arena(total) if spans else None
        self._free: list[Tensor] = []
        if self._arena is not None:
            memory = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
            self._free = [memory[start : start + num_bytes] for start, num_bytes in spans]

    def populate(self) -> None:
        """Takes the RAM now: the first copies would else wait for its pages. From any thread, which need not be waited
        for: where the RAM is not there, or is given up meanwhile, copies take it page by page, as far as they get."""
        if self._arena is not None:
            with suppress(MegatrainError, RuntimeError):  # RuntimeError: the interpreter is ending
                self._arena.populate(POPULATE_THREADS)

    def take(self, num_bytes: int) -> Tensor | None:
        """The smallest free region of at least `num_bytes` (uint8); None where there is none."""
        fitting = [region for region in self._free if region.numel() >= num_bytes]
        if not fitting:
            return None
        smallest = min(fitting, key=Tensor.numel)
        self._free = [region for region in self._free if region is not smallest]
        return smallest

    def give_back(self, region: Tensor) -> None:
        """A region that `take` gave."""
        self._free.append(region)

    def close(self) -> None:
        """Gives the memory up. Idempotent."""
        self._free = []
        if self._arena is not None:
            self._arena.close()


def _new_arena(num_bytes: int) -> Arena:
    """Nobody else needs to attach it."""
    holder = ArenaHolder.create({"save-copies": num_bytes})
    try:
        return holder.map("save-copies")
    finally:
        holder.close()
