"""Finds on which NUMA nodes the pages of a run's arenas and offloaded activations are, and compares with the plan.

Pages are looked up as the run's processes have mapped them. Nothing is moved, and no page is touched.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.engine.device.numa_homes import slab_nodes
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.io.arenas.numa_policy import nodes_of_pages
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_processes import gpu_name, living, shard_name
from megatrain_ray.units import format_ranges
from megatrain_ray.workers.arenas import SLAB, WORKING, journal_arena, state_arena

PAGE_BYTES = 4096  # distance of looked-up addresses; a larger page of the kernel is looked up several times
MAX_PAGES = 1 << 16  # pages that are looked up of an arena in a process; takes 0.03 s
MAPPED = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) .*/memfd:megatrain-[0-9a-f]{8}-(?P<arena>\S+)")
MISPLACED = 0.05  # tolerated share of misplaced pages; more than the huge pages that two shards share
OWN = "activations"  # label of a GPU worker's offloaded activations, which are in its private memory
MIN_OWN_BYTES = 256 << 20  # smaller mappings cannot be told from other private memory of the process
OWN_MAPPED = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) rw-p 0+ 00:00 0 *(\[anon:.*\])?")


@dataclass(frozen=True)
class PagePlacement:
    """Counts by node the touched pages of an arena, or of private memory, of one process.

    planned: nodes on which the plan has them.
    found: number of pages by node, among those looked up.
    """

    process: str
    arena: str
    planned: tuple[int, ...]
    found: Mapping[int, int]

    @property
    def planned_share(self) -> float:
        """Return the share of pages on planned nodes; 1 if no page is touched."""
        total = sum(self.found.values())
        return sum(self.found.get(node, 0) for node in self.planned) / total if total else 1.0

    @property
    def is_good(self) -> bool:
        return self.planned_share >= 1 - MISPLACED

    def __str__(self) -> str:
        total = sum(self.found.values())
        if not total:
            return f"{self.process}, {self.arena}: no page is touched yet"
        where = ", ".join(f"node {node} {count / total:.1%}" for node, count in sorted(self.found.items()))
        return f"{self.process}, {self.arena}: {where} (plan: node {format_ranges(self.planned)})"


def pages_of_run(files: RunFiles) -> Iterator[PagePlacement]:
    """Yield the placement of a run's pages; nothing unless the run is active and its plan binds memory to nodes.

    Raises OSError as `page_placements` does.
    """
    plan, pids = files.read_plan(), living(files.path)
    if plan is not None and plan.shards.homes and pids:
        yield from page_placements(plan, pids)


def page_placements(plan: Plan, pids: Mapping[str, int]) -> Iterator[PagePlacement]:
    """Yield the placement of everything that the plan binds to nodes. `pids` are those of the run, by name.

    Raises OSError if a process has ended or belongs to another user.
    """
    for k, home in enumerate(plan.shards.homes):
        if (name := shard_name(k)) in pids:
            found = pages_of(pids[name])
            for arena in (WORKING, state_arena(k), journal_arena(k)):  # a shard touches only its part of `working`
                yield PagePlacement(name, arena, home.memory, found.get(arena, {}))
    for host_rank in range(plan.hosts.gpus_per_host if plan.hosts.gpu_homes else 0):
        if (name := gpu_name(host_rank)) in pids:
            yield from _of_gpu_worker(plan, name, pids[name])


def _of_gpu_worker(plan: Plan, name: str, pid: int) -> Iterator[PagePlacement]:
    """Yield the placement of a GPU worker's memory. Its CPU affinity shows which GPU it has."""
    cpus = os.sched_getaffinity(pid)
    home = next((of_gpu.home for of_gpu in plan.hosts.gpu_homes if of_gpu.home and of_gpu.home.cpu_set == cpus), None)
    yield PagePlacement(
        name, SLAB, slab_nodes(plan.hosts.gpu_homes, plan.hosts.gpus_per_host, home), pages_of(pid).get(SLAB, {})
    )
    if home and plan.host_activation_bytes >= MIN_OWN_BYTES:
        yield PagePlacement(name, OWN, home.memory, own_pages_of(pid, plan.host_activation_bytes))


def pages_of(pid: int) -> dict[str, dict[int, int]]:
    """Return the number of pages by node of every arena that a process maps.

    At most MAX_PAGES pages of an arena are looked up, at equal distances. Raises OSError as `page_placements` does.
    """
    stretches: dict[str, list[range]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if found := MAPPED.match(line):
            stretches.setdefault(found["arena"], []).append(_addresses(found))
    return {arena: _count(pid, parts) for arena, parts in stretches.items()}


def own_pages_of(pid: int, min_bytes: int) -> dict[int, int]:
    """Return the number of pages by node of a process's private mappings of `min_bytes` or more without a file."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    parts = [_addresses(found) for line in lines if (found := OWN_MAPPED.fullmatch(line))]
    return _count(pid, [part for part in parts if len(part) * PAGE_BYTES >= min_bytes])


def _addresses(found: re.Match[str]) -> range:
    return range(int(found["start"], 16), int(found["stop"], 16), PAGE_BYTES)


def _count(pid: int, parts: list[range]) -> dict[int, int]:
    every = -(-sum(map(len, parts)) // MAX_PAGES)
    addresses = [address for part in parts for address in part[::every]]
    return dict(Counter(node for node in nodes_of_pages(addresses, pid) if node is not None))
