"""The arena owner: creates shared memory and holds it, so that any other process may die and attach again."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatrain_ray.engine.host_words import HostWords
from megatrain_ray.engine.layout import ModelLayout, ShardLayout
from megatrain_ray.engine.plan import Plan
from megatrain_ray.io.arena import ArenaHandle, create_memfd

WORKING = "working"
SLAB = "slab"
WORDS = "words"


def state_arena(shard: int) -> str:
    return f"state-{shard}"


def arena_sizes(plan: Plan, layout: ModelLayout) -> dict[str, int]:
    """Bytes of every arena of a run: three that all attach, and one that only its shard does."""
    per_element = sum(dtype.itemsize for _, dtype in plan.precision.state_kinds)
    sizes = {
        WORKING: layout.size * plan.precision.working_dtype.itemsize,
        SLAB: plan.slab_bytes,
        WORDS: 8 * HostWords.num_words(len(layout.layers), plan.num_shards),
    }
    for k in range(plan.num_shards):
        sizes[state_arena(k)] = ShardLayout(layout, k, plan.num_shards, plan.shard_cut_elements).size * per_element
    return sizes


class ArenaOwner:
    """Holds file descriptors; maps nothing."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._handles = {
            name: ArenaHandle(pid=os.getpid(), fd=create_memfd(name, num_bytes), nbytes=num_bytes, name=name)
            for name, num_bytes in sizes.items()
        }

    def handles(self) -> dict[str, ArenaHandle]:
        """For `Arena.attach` in any process of this machine."""
        return dict(self._handles)
