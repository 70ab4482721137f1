"""Allocates RAM for copies of layers once, and lends it to one save after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import round_up
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena_holder import Arena, ArenaHolder

PAGE_BYTES = 4096
POPULATE_THREADS = 4  # they run while other work starts or computes


class SnapshotBuffers:
    """Holds memory regions for copies of as many layers as fit in a budget. Not thread-safe, except for `populate`."""

    def __init__(self, layer_bytes: Sequence[int], budget_bytes: int) -> None:
        """Reserve a region for each layer, in order, as long as the budget allows.

        layer_bytes: size of each layer's copy, in the order in which layers will need one.
        budget_bytes: limit of all regions together, each rounded up to whole pages.
        """
        spans, total = [], 0
        for num_bytes in layer_bytes:
            if num_bytes and total + round_up(num_bytes, PAGE_BYTES) <= budget_bytes:
                spans.append((total, num_bytes))
                total += round_up(num_bytes, PAGE_BYTES)
        self._arena: Arena | None = None
        self._free: list[Tensor] = []
        if spans:
            with closing(ArenaHolder.create({"save-copies": total})) as holder:  # no other process attaches it
                self._arena = holder.map("save-copies")
            memory = torch.frombuffer(self._arena.buffer, dtype=torch.uint8)
            self._free = [memory[start : start + num_bytes] for start, num_bytes in spans]

    def populate(self) -> None:
        """Make the system provide all pages now: otherwise the first copies would wait for them.

        It may run in any thread, and nobody has to wait for it. If RAM is short or the memory is released meanwhile,
        copies get their pages one by one, as far as possible.
        """
        if self._arena is not None:
            with suppress(MegatrainError, RuntimeError):  # RuntimeError: the interpreter is ending
                self._arena.populate(POPULATE_THREADS)

    def take(self, num_bytes: int) -> Tensor | None:
        """Return the smallest free region of at least `num_bytes` (1-D uint8), or None if there is none."""
        fitting = [region for region in self._free if region.numel() >= num_bytes]
        if not fitting:
            return None
        smallest = min(fitting, key=Tensor.numel)
        self._free = [region for region in self._free if region is not smallest]
        return smallest

    def give_back(self, region: Tensor) -> None:
        self._free.append(region)

    def close(self) -> None:
        self._free = []
        if self._arena is not None:
            self._arena.close()
