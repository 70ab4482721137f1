"""Brings processes home: their threads, and what of the arenas is theirs, before anybody touches it.

Shard k has its state and its journal whole, and of `working` its part of every layer; the GPU workers the slab. Whoever
fills a page first, which of `working` may be another shard, gets it on the node of the one whose it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatrain_ray.engine.device.cuda_device import pci_addresses
from megatrain_ray.engine.device.numa_homes import Home, home_at, slab_nodes
from megatrain_ray.engine.layout.flat_layout import round_up
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.io.arenas.arena import HUGE_PAGE, Arena, mapped_bytes
from megatrain_ray.io.arenas.numa_policy import take_from
from megatrain_ray.units import format_ranges
from megatrain_ray.workers.arenas import SLAB, WORKING, journal_arena, state_arena
from megatrain_ray.workers.numa_pinning import pin_process


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
    home = plan.shard_homes[part.index]
    problem = pin_process(home.cpu_set) if pinned else ""
    return _told(problem, _take(home.memory, arenas, shard_stretches(plan, part, sizes)))


def settle_gpu_worker(plan: Plan, arenas: Mapping[str, Arena], host_rank: int, *, pinned: bool) -> tuple[str, ...]:
    """The same of a GPU worker and the slab. Ray decides which GPU a worker gets, so that is asked here; on the CPU
    device it is the one of its `host_rank`. What a worker alone has in host memory its threads touch first, at home."""
    if not plan.gpu_homes:
        return ()
    home, problem = _home_here(plan, host_rank)
    if home and pinned:
        problem += pin_process(home.cpu_set)
    of_slab = [] if host_rank else [Stretch(SLAB, 0, arenas[SLAB].buffer.nbytes)]
    return _told(problem, _take(slab_nodes(plan.gpu_homes, plan.host_gpus, home), arenas, of_slab))


def _home_here(plan: Plan, host_rank: int) -> tuple[Home | None, str]:
    """Of this process's GPU, and what is wrong with the plan's knowledge of it."""
    if plan.device == "cpu":
        return plan.gpu_homes[host_rank].home, ""
    address = next(iter(pci_addresses()), None)
    home = home_at(plan.gpu_homes, address)
    if home or (address and address in [of_gpu.address for of_gpu in plan.gpu_homes]):
        return home, ""
    return None, f"the plan does not know the GPU at {address or 'an unknown address'}, so its worker runs on any CPUs"


def _told(*problems: str) -> tuple[str, ...]:
    return tuple(filter(None, problems))


def _take(nodes: Sequence[int], arenas: Mapping[str, Arena], stretches: Iterable[Stretch]) -> str:
    for name, start, stop in stretches:
        try:
            take_from(arenas[name].buffer[start:stop], nodes)
        except OSError as error:
            return (
                f"the kernel does not take memory from node {format_ranges(nodes)} (mbind: "
                f"{os.strerror(error.errno or 0)}), so pages are where the first thread to touch them runs"
            )
    return ""
