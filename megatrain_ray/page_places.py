"""Where the pages of a run's arenas really are, as its processes have them mapped; and whether that is where the plan
has them. Nothing is moved, and no page is touched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.arenas import SLAB, WORKING, journal_arena, state_arena
from megatrain_ray.engine.homes import Home
from megatrain_ray.engine.plan import Plan
from megatrain_ray.io.memory_policy import nodes_of_pages
from megatrain_ray.roles import GPU, shard_name
from megatrain_ray.units import format_ranges

PAGE_BYTES = 4096  # a step between pages that are asked for; a larger page of the kernel is asked for several times
MOST_PAGES = 1 << 16  # of an arena in a process: 0.03 s
MAPPED = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) .*/memfd:megatrain-[0-9a-f]{8}-(?P<arena>\S+)")
MISPLACED = 0.05  # share of pages: more than the huge pages that two shards share


@dataclass(frozen=True)
class PagePlaces:
    """Of what a process has touched of an arena. `found`: pages by node, of those that were asked for; `home`: where
    the plan has them."""

    process: str
    arena: str
    home: Home
    found: Mapping[int, int]

    @property
    def at_home(self) -> float:
        """Share of the pages; 1 where there are none."""
        total = sum(self.found.values())
        return sum(self.found.get(node, 0) for node in self.home.memory) / total if total else 1.0

    @property
    def is_good(self) -> bool:
        return self.at_home >= 1 - MISPLACED

    def __str__(self) -> str:
        total = sum(self.found.values())
        if not total:
            return f"{self.process}, {self.arena}: no page is touched yet"
        where = ", ".join(f"node {node} {count / total:.1%}" for node, count in sorted(self.found.items()))
        return f"{self.process}, {self.arena}: {where} (plan: node {format_ranges(self.home.memory)})"


def page_places(plan: Plan, pids: Mapping[str, int]) -> Iterator[PagePlaces]:
    """Of all that the plan has homes for. `pids`: of the run's processes, by their names. Raises OSError for a process
    that has gone, or of another user."""
    for name, arena, home in _planned(plan):
        if name in pids:
            yield PagePlaces(name, arena, home, pages_of(pids[name]).get(arena, {}))


def pages_of(pid: int) -> dict[str, dict[int, int]]:
    """Pages by node of every arena of a process, at most MOST_PAGES that lie at equal distances in each. Raises as
    `page_places`."""
    stretches: dict[str, list[range]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if found := MAPPED.match(line):
            addresses = range(int(found["start"], 16), int(found["stop"], 16), PAGE_BYTES)
            stretches.setdefault(found["arena"], []).append(addresses)
    return {arena: _count(pid, parts) for arena, parts in stretches.items()}


def _count(pid: int, parts: list[range]) -> dict[int, int]:
    every = -(-sum(map(len, parts)) // MOST_PAGES)
    addresses = [address for part in parts for address in part[::every]]
    return dict(Counter(node for node in nodes_of_pages(addresses, pid) if node is not None))


def _planned(plan: Plan) -> Iterator[tuple[str, str, Home]]:
    """Process, arena, and where its pages should be. Of `working` a shard maps all and touches its own part."""
    for k, home in enumerate(plan.shard_homes):
        yield from ((shard_name(k), arena, home) for arena in (WORKING, state_arena(k), journal_arena(k)))
    if plan.gpu_home:
        yield GPU, SLAB, plan.gpu_home
