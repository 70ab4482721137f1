"""Where the pages of a run's arenas really are, as its processes have them mapped, and those of activations that wait
on the host; and whether that is where the plan has them. Nothing is moved, and no page is touched."""

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
from megatrain_ray.run.process_names import gpu_name, shard_name
from megatrain_ray.units import format_ranges
from megatrain_ray.workers.arenas import SLAB, WORKING, journal_arena, state_arena

PAGE_BYTES = 4096  # a step between pages that are asked for; a larger page of the kernel is asked for several times
MOST_PAGES = 1 << 16  # of an arena in a process: 0.03 s
MAPPED = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) .*/memfd:megatrain-[0-9a-f]{8}-(?P<arena>\S+)")
MISPLACED = 0.05  # share of pages: more than the huge pages that two shards share
OWN = "activations"  # of a GPU worker, in memory that is its alone
LEAST_OWN_BYTES = 256 << 20  # of these: of less one could not tell them from what the process has besides
OWN_MAPPED = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) rw-p 0+ 00:00 0 *(\[anon:.*\])?")


@dataclass(frozen=True)
class PagePlaces:
    """Of what a process has touched of an arena, or of its own memory. `found`: pages by node, of those that were asked
    for; `planned`: the nodes where the plan has them."""

    process: str
    arena: str
    planned: tuple[int, ...]
    found: Mapping[int, int]

    @property
    def at_home(self) -> float:
        """Share of the pages; 1 where there are none."""
        total = sum(self.found.values())
        return sum(self.found.get(node, 0) for node in self.planned) / total if total else 1.0

    @property
    def is_good(self) -> bool:
        return self.at_home >= 1 - MISPLACED

    def __str__(self) -> str:
        total = sum(self.found.values())
        if not total:
            return f"{self.process}, {self.arena}: no page is touched yet"
        where = ", ".join(f"node {node} {count / total:.1%}" for node, count in sorted(self.found.items()))
        return f"{self.process}, {self.arena}: {where} (plan: node {format_ranges(self.planned)})"


def page_places(plan: Plan, pids: Mapping[str, int]) -> Iterator[PagePlaces]:
    """Of all that the plan has homes for. `pids`: of the run's processes, by their names. Raises OSError for a process
    that has gone, or of another user."""
    for k, home in enumerate(plan.shard_homes):
        if (name := shard_name(k)) in pids:
            found = pages_of(pids[name])
            for arena in (WORKING, state_arena(k), journal_arena(k)):  # of `working` it maps all and touches its part
                yield PagePlaces(name, arena, home.memory, found.get(arena, {}))
    for host_rank in range(plan.host_gpus if plan.gpu_homes else 0):
        if (name := gpu_name(host_rank)) in pids:
            yield from _of_gpu_worker(plan, name, pids[name])


def _of_gpu_worker(plan: Plan, name: str, pid: int) -> Iterator[PagePlaces]:
    """Its CPUs tell which GPU it has got."""
    cpus = os.sched_getaffinity(pid)
    home = next((of_gpu.home for of_gpu in plan.gpu_homes if of_gpu.home and of_gpu.home.cpu_set == cpus), None)
    yield PagePlaces(name, SLAB, slab_nodes(plan.gpu_homes, plan.host_gpus, home), pages_of(pid).get(SLAB, {}))
    if home and plan.host_activation_bytes >= LEAST_OWN_BYTES:
        yield PagePlaces(name, OWN, home.memory, own_pages_of(pid, plan.host_activation_bytes))


def pages_of(pid: int) -> dict[str, dict[int, int]]:
    """Pages by node of every arena of a process, at most MOST_PAGES that lie at equal distances in each. Raises as
    `page_places`."""
    stretches: dict[str, list[range]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if found := MAPPED.match(line):
            stretches.setdefault(found["arena"], []).append(_addresses(found))
    return {arena: _count(pid, parts) for arena, parts in stretches.items()}


def own_pages_of(pid: int, least_bytes: int) -> dict[int, int]:
    """The same of mappings of its own, of no file, that are so large; all of them together."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    parts = [_addresses(found) for line in lines if (found := OWN_MAPPED.fullmatch(line))]
    return _count(pid, [part for part in parts if len(part) * PAGE_BYTES >= least_bytes])


def _addresses(found: re.Match[str]) -> range:
    return range(int(found["start"], 16), int(found["stop"], 16), PAGE_BYTES)


def _count(pid: int, parts: list[range]) -> dict[int, int]:
    every = -(-sum(map(len, parts)) // MOST_PAGES)
    addresses = [address for part in parts for address in part[::every]]
    return dict(Counter(node for node in nodes_of_pages(addresses, pid) if node is not None))
