"""Implements the checks of `megatrain doctor` on NUMA.

They report the nodes, whether the kernel allocates memory on each of them, and on which nodes the pages of an active
run are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatrain_ray.engine.device.cuda_info import pci_addresses
from megatrain_ray.io.arenas.arena_holder import HUGE_PAGE, ArenaHolder
from megatrain_ray.io.arenas.numa_policy import address_of, nodes_of_pages, take_from
from megatrain_ray.machine.numa_topology import NodeFacts, Topology, gpu_node, read_topology
from megatrain_ray.report.page_placement import pages_of_run
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.units import format_bytes, format_ranges

TOPIC = "NUMA"


class Severity(Enum):
    GOOD = "good"
    NOTE = "note"  # works, but could be improved
    SLOW = "slow"
    STOP = "stop"


@dataclass(frozen=True)
class Finding:
    """Describes one finding; `advice` says what to do about it, and is empty if nothing has to be done."""

    topic: str
    severity: Severity
    text: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.severity.value:<5} {self.topic:<15} {self.text}{advice}"


def examine_nodes(folder: Path, root: Path) -> Iterator[Finding]:
    """Yield the findings on NUMA. With a single usable node only that fact, and the pages of a run, are reported.

    folder: folder of runs, or one run's directory.
    root: folder that holds /proc and /sys.
    """
    topology = read_topology(root)
    if len(topology.usable) < 2:
        yield Finding(TOPIC, Severity.GOOD, f"one node to work on{_others(topology)}: nothing has to be put on any")
    else:
        yield Finding(TOPIC, Severity.GOOD, "; ".join(map(_described, topology.nodes)))
        yield _takes_memory(sorted({node.memory for node in topology.usable}))
        yield from _gpus(root)
    yield from _pages(folder)


def _described(node: NodeFacts) -> str:
    cpus = f"CPUs {format_ranges(node.cpus)}" if node.cpus else "no CPUs to use"
    of_it = f"{format_bytes(node.total_bytes)}, {format_bytes(node.free_bytes)} free"
    memory = of_it if node.total_bytes else "no memory"
    kept = ", which a cpuset keeps from this process" if node.total_bytes and not node.may_hold else ""
    return f"node {node.number}: {cpus}, {memory}{kept}"


def _others(topology: Topology) -> str:
    others = [_described(node) for node in topology.nodes if not node.cpus]
    return f" ({'; '.join(others)})" if others else ""


def _gpus(root: Path) -> Iterator[Finding]:
    addresses = pci_addresses()
    nodes = [gpu_node(address, root) for address in addresses]
    if not nodes:
        return
    described = (
        f"GPU {k} ({address or 'no address'}) on node {'?' if node is None else node}"
        for k, (address, node) in enumerate(zip(addresses, nodes, strict=True))
    )
    if None in nodes:
        advice = "name them as hardware.nodes.*.gpus (docs/numa.md); its worker runs anywhere else"
        yield Finding("NUMA GPUs", Severity.NOTE, ", ".join(described), advice)
    else:
        yield Finding("NUMA GPUs", Severity.GOOD, ", ".join(described))


def _takes_memory(nodes: Sequence[int]) -> Finding:
    """Allocate a huge page on each node as a run does, and check on which node it is."""
    elsewhere = []
    with closing(ArenaHolder.create({"doctor": HUGE_PAGE * len(nodes)})) as holder:
        arena = holder.map("doctor")
        try:
            for k, node in enumerate(nodes):
                page = arena.buffer[k * HUGE_PAGE : (k + 1) * HUGE_PAGE]
                take_from(page, [node])
                page[0] = 1
                if nodes_of_pages([address_of(page)]) != [node]:
                    elsewhere.append(node)
        except OSError as error:
            text = f"the kernel does not take memory from a node that is asked for ({os.strerror(error.errno or 0)})"
            advice = "in a container allow mbind and move_pages (docker: --cap-add SYS_NICE)"
            return Finding("NUMA memory", Severity.SLOW, text, advice)
        finally:
            arena.close()
    if elsewhere:
        text = f"what was asked for from node {format_ranges(elsewhere)} is on another: it may be full"
        return Finding("NUMA memory", Severity.SLOW, text, "free some of its memory")
    return Finding("NUMA memory", Severity.GOOD, f"pages are on the node that was asked for, of {format_ranges(nodes)}")


def _pages(folder: Path) -> Iterator[Finding]:
    """Yield on which nodes the pages of an active run in this folder are."""
    try:
        for places in pages_of_run(RunFiles(folder.absolute())):
            yield Finding("pages", Severity.GOOD if places.is_good else Severity.SLOW, str(places))
    except OSError as error:
        yield Finding("pages", Severity.NOTE, f"the kernel does not say where they are: {error.strerror}")
