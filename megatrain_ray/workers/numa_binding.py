"""Binds the threads of a process and its part of the arenas to their NUMA nodes, before any page is touched.

Shard k owns its state and its journal, and its part of every layer in `working`. The GPU workers own the slab. A page
of `working` may be filled first by another shard; binding puts it on its owner's node nevertheless.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatrain_ray.engine.device.cuda_info import pci_addresses
from megatrain_ray.engine.device.numa_homes import Home, home_at, slab_nodes
from megatrain_ray.engine.layout.flat_layout import round_up
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.io.arenas.arena_holder import HUGE_PAGE, Arena, mapped_bytes
from megatrain_ray.io.arenas.numa_policy import take_from
from megatrain_ray.units import format_ranges
from megatrain_ray.workers.arenas import SLAB, WORKING, journal_arena, state_arena

TASKS = Path("/proc/self/task")


class ArenaRange(NamedTuple):
    """Names the bytes `start` to `stop` of an arena, in whole huge pages."""

    arena: str
    start: int
    stop: int


def shard_ranges(plan: Plan, part: ShardLayout, sizes: Mapping[str, int]) -> Iterator[ArenaRange]:
    """Yield the ranges that a shard owns. `sizes`: of arenas, in bytes.

    A huge page that two shards share belongs to the owner of its first byte, so that no page is bound to two nodes.
    Cuts are 2 MiB apart, but a layer may begin between two of them.
    """
    for name in (state_arena(part.index), journal_arena(part.index)):
        yield ArenaRange(name, 0, mapped_bytes(sizes[name]))
    item = plan.precision.working_dtype.itemsize
    for layer in sorted(plan.weights_on_host):
        share = part.model.shares[layer]
        wide = part.model.layers[layer].wide_of(part.spans[layer])
        for span in (part.spans[layer], part.frozen_spans[layer], wide):
            first = part.working_starts[layer] + share.position(span.start)
            start, stop = (round_up(edge * item, HUGE_PAGE) for edge in (first, first + span.size))
            if start < stop:
                yield ArenaRange(WORKING, start, stop)


def bind_shard(plan: Plan, part: ShardLayout, arenas: Mapping[str, Arena], *, pinned: bool) -> tuple[str, ...]:
    """Bind a shard's memory to its home (CPUs and NUMA nodes), and with `pinned` all threads of this process.

    Nothing of that memory may have been touched. Returns what the kernel refused.
    """
    if not plan.shards.homes:
        return ()
    sizes = {name: arena.handle.nbytes for name, arena in arenas.items()}
    home = plan.shards.homes[part.index]
    unpinned = pin_process(home.cpu_set) if pinned else ""
    unbound = _bind(home.memory, arenas, shard_ranges(plan, part, sizes))
    return tuple(filter(None, (unpinned, unbound)))


def bind_gpu_worker(plan: Plan, arenas: Mapping[str, Arena], host_rank: int, *, pinned: bool) -> tuple[str, ...]:
    """Bind the slab to its NUMA nodes, and with `pinned` all threads of this process to their home. Return what failed.

    Ray decides which GPU a worker gets, so the GPU is looked up here; on the CPU device it is that of `host_rank`. Host
    memory that only this worker has needs no binding: its threads touch it first, at home.
    """
    if not plan.hosts.gpu_homes:
        return ()
    home, problem = _home_here(plan, host_rank)
    if home and pinned:
        problem += pin_process(home.cpu_set)
    slab = [] if host_rank else [ArenaRange(SLAB, 0, arenas[SLAB].buffer.nbytes)]
    unbound = _bind(slab_nodes(plan.hosts.gpu_homes, plan.hosts.gpus_per_host, home), arenas, slab)
    return tuple(filter(None, (problem, unbound)))


def _home_here(plan: Plan, host_rank: int) -> tuple[Home | None, str]:
    """Return the home of this process's GPU, and a text if the plan does not know that GPU."""
    if plan.device == "cpu":
        return plan.hosts.gpu_homes[host_rank].home, ""
    address = next(iter(pci_addresses()), None)
    home = home_at(plan.hosts.gpu_homes, address)
    if home or (address and address in [gpu.address for gpu in plan.hosts.gpu_homes]):
        return home, ""
    return None, f"the plan does not know the GPU at {address or 'an unknown address'}, so its worker runs on any CPUs"


def _bind(nodes: Sequence[int], arenas: Mapping[str, Arena], ranges: Iterable[ArenaRange]) -> str:
    for name, start, stop in ranges:
        try:
            take_from(arenas[name].buffer[start:stop], nodes)
        except OSError as error:
            return (
                f"the kernel does not take memory from node {format_ranges(nodes)} (mbind: "
                f"{os.strerror(error.errno or 0)}), so pages are where the first thread to touch them runs"
            )
    return ""


def pin_process(cpus: Set[int]) -> str:
    """Let every thread of this process run on `cpus` only, as far as the kernel allows it.

    Returns what went wrong; empty if nothing did. It never ends a run. A thread inherits its CPUs from the one that
    starts it. sched_setaffinity moves one thread, and a process of Ray has about 20 before any of ours.
    """
    try:
        # Repeat until no thread is left: one that was not moved yet may have started another one meanwhile.
        while left := _threads_elsewhere(cpus):
            for thread in left:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, cpus)
            if stuck := left & _threads_elsewhere(cpus):
                return f"{len(stuck)} threads do not stay on CPUs {format_ranges(cpus)}: a cpuset has fewer of them"
    except OSError as error:
        return f"threads cannot be kept on CPUs {format_ranges(cpus)}: {error.strerror}"
    return ""


def _threads_elsewhere(cpus: Set[int]) -> set[int]:
    """Return the threads of this process that may run on other CPUs, or not on all of these."""
    found = set()
    for thread in (int(path.name) for path in TASKS.iterdir()):
        with suppress(ProcessLookupError):  # it has ended
            if os.sched_getaffinity(thread) != cpus:
                found.add(thread)
    return found
