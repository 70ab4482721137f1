"""Brings processes home: their threads, and what of the arenas is theirs, before anybody touches it.

Shard k has its state and its journal whole, and of `working` its part of every layer; the GPU worker the slab. Whoever
fills a page first, which of `working` may be another shard, gets it on the node of the one whose it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megatrain_ray.arenas import SLAB, WORKING, journal_arena, state_arena
from megatrain_ray.engine.flat_layout import round_up
from megatrain_ray.engine.homes import Home
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.shard_layout import ShardLayout
from megatrain_ray.io.arena import HUGE_PAGE, Arena, mapped_bytes
from megatrain_ray.io.memory_policy import take_from
from megatrain_ray.pinning import pin_process
from megatrain_ray.units import format_ranges


class Stretch(NamedTuple):
    """Bytes `start` to `stop` of an arena: whole huge pages."""

    arena: str
    start: int
    stop: int


def shard_stretches(plan: Plan, part: ShardLayout, sizes: Mapping[str, int]) -> Iterator[Stretch]:
    """Of a shard. `sizes`: of arenas, in bytes. A huge page that two shards share belongs to whom its first byte
    belongs to, so that no page is two nodes': cuts are 2 MiB apart, but a layer may begin between two."""
    for name in (state_arena(part.index), journal_arena(part.index)):
        yield Stretch(name, 0, mapped_bytes(sizes[name]))
    item = plan.precision.working_dtype.itemsize
    for layer in sorted(plan.weights_on_host):
        share = part.model.shares[layer]
        for span in (part.spans[layer], part.frozen_spans[layer]):
            first = part.working_starts[layer] + share.position(span.start)
            start, stop = (round_up(edge * item, HUGE_PAGE) for edge in (first, first + span.size))
            if start < stop:
                yield Stretch(WORKING, start, stop)


def settle_shard(plan: Plan, part: ShardLayout, arenas: Mapping[str, Arena], *, pinned: bool) -> tuple[str, ...]:
    """Brings a shard home: its memory, of which nobody has touched anything, and with `pinned` all threads of this
    process. What the kernel said against it; nothing is asked where the plan has no homes."""
    if not plan.shard_homes:
        return ()
    sizes = {name: arena.handle.nbytes for name, arena in arenas.items()}
    return _settle(plan.shard_homes[part.index], arenas, shard_stretches(plan, part, sizes), pinned)


def settle_gpu_worker(plan: Plan, arenas: Mapping[str, Arena], *, pinned: bool) -> tuple[str, ...]:
    """The same of the GPU worker and the slab: what the GPU copies does not cross between nodes."""
    if plan.gpu_home is None:
        return ()
    return _settle(plan.gpu_home, arenas, [Stretch(SLAB, 0, arenas[SLAB].buffer.nbytes)], pinned)


def _settle(home: Home, arenas: Mapping[str, Arena], stretches: Iterable[Stretch], pinned: bool) -> tuple[str, ...]:
    problems = (pin_process(home.cpu_set) if pinned else "", _take(home, arenas, stretches))
    return tuple(filter(None, problems))


def _take(home: Home, arenas: Mapping[str, Arena], stretches: Iterable[Stretch]) -> str:
    for name, start, stop in stretches:
        try:
            take_from(arenas[name].buffer[start:stop], home.memory)
        except OSError as error:
            return (
                f"the kernel does not take memory from node {format_ranges(home.memory)} (mbind: "
                f"{os.strerror(error.errno or 0)}), so pages are where the first thread to touch them runs"
            )
    return ""
