"""Memory and threads that are put on nodes: what the kernel is asked, and what it then says, on this machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.engine.device.numa_homes import GpuHome, Home
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import shard_layout
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.io.arenas import numa_policy
from megatrain_ray.io.arenas.arena_holder import HUGE_PAGE, Arena, ArenaHolder
from megatrain_ray.io.arenas.numa_policy import address_of, nodes_of_pages, take_from
from megatrain_ray.report.page_placement import PagePlacement, page_placements, pages_of
from megatrain_ray.run.run_processes import GPU, shard_name
from megatrain_ray.workers import numa_binding
from megatrain_ray.workers.arenas import SLAB, WORKING, arena_sizes, journal_arena, state_arena
from megatrain_ray.workers.numa_binding import ArenaRange, bind_gpu_worker, bind_shard, shard_ranges
from tests.support.runs import ROOT
from tests.support.shapes import qwen

FIRST_CPU, *_ = sorted(os.sched_getaffinity(0))
HERE = Home((0,), str(FIRST_CPU), (0,))
NOWHERE = Home((1,), str(FIRST_CPU), (60,))  # a number of no node of this machine


def planned_large(precision: Precision, num_shards: int, num_nodes: int = 2) -> tuple[Plan, ModelLayout]:
    """Return a plan of layers that are several huge pages each, on a CPU, without homes."""
    structure, activations = qwen(2, 32, hidden=512, heads=8, kv_heads=8, inner=2048, vocab=4096)
    machine = Machine("cpu", num_cpus=2, num_nodes=num_nodes, ram_bytes=64 << 30, hbm_bytes=None)
    request = Request(precision, False, True, 1, 1, 32, num_shards=num_shards, saves=False)
    plan = make_plan(structure, activations, machine, request)
    return plan, structure.layout(plan.num_fragments)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(ArenaHolder.create({"tests": 3 * HUGE_PAGE})) as holder, closing(holder.map("tests")) as arena:
        yield arena


def policies(pid: int | str = "self") -> list[str]:
    """Return the memory policies of all ranges of arenas, as the kernel has them."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    return [line.split()[1] for line in lines if "memfd:megatrain-" in line]


def test_pages_come_from_the_node_that_was_asked_for(arena: Arena) -> None:
    take_from(arena.buffer[:HUGE_PAGE], [0])
    arena.buffer[1] = arena.buffer[2 * HUGE_PAGE] = 1
    assert policies() == ["prefer:0", "default"]
    start = address_of(arena.buffer)
    assert nodes_of_pages([start, start + 5, start + HUGE_PAGE, start + 2 * HUGE_PAGE]) == [0, 0, None, 0]


def test_another_process_has_them_where_the_first_one_asked(arena: Arena) -> None:
    """The kernel keeps it with the memory, and whoever touches it first need not know."""
    take_from(arena.buffer[:HUGE_PAGE], [0])
    path = f"/proc/{os.getpid()}/fd/{arena.handle.fd}"
    code = (
        "import mmap, os, sys\n"
        f"memory = mmap.mmap(os.open({path!r}, os.O_RDWR), {HUGE_PAGE})\n"
        "memory[0] = 1\n"
        "print(*(line.split()[1] for line in open('/proc/self/numa_maps') if 'megatrain' in line))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "prefer:0"


def test_several_nodes_give_pages_in_turn(arena: Arena) -> None:
    take_from(arena.buffer, [0, 0])
    assert policies() == ["interleave:0"]


def test_what_the_kernel_refuses(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Invalid argument") as refused:
        take_from(arena.buffer, NOWHERE.memory)
    assert refused.value.errno == errno.EINVAL
    take_from(arena.buffer[:0], [0])
    assert nodes_of_pages([]) == []
    with pytest.raises(OSError, match="No such process"):
        nodes_of_pages([address_of(arena.buffer)], pid=2**22 - 1)
    monkeypatch.setattr(numa_policy, "CALLS", {})
    with pytest.raises(OSError, match="no numbers of system calls"):
        take_from(arena.buffer, [0])


def test_every_thread_stays_and_so_do_those_it_starts() -> None:
    """The test has a process of its own, since this one goes on with its tests."""
    code = (
        "import os, threading, pathlib\n"
        "from megatrain_ray.workers.numa_binding import pin_process\n"
        "hold = threading.Event()\n"
        "for _ in range(5): threading.Thread(target=hold.wait, daemon=True).start()\n"
        f"assert pin_process({{{FIRST_CPU}}}) == ''\n"
        "threading.Thread(target=hold.wait, daemon=True).start()\n"
        "found = [line.split()[1] for task in pathlib.Path('/proc/self/task').iterdir()\n"
        "         for line in (task / 'status').read_text().splitlines() if line.startswith('Cpus_allowed_list')]\n"
        "print(*found)\n"
        "hold.set()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    found = done.stdout.split()
    assert len(found) >= 7, "those of libraries may be more"
    assert set(found) == {str(FIRST_CPU)}


def test_cpus_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa_binding.pin_process({100_000}) == "threads cannot be kept on CPUs 100000: Invalid argument"
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: None)  # as where a cpuset has fewer
    assert "threads do not stay on CPUs 0-9: a cpuset has fewer" in numa_binding.pin_process(set(range(10)))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("num_shards", [2, 3])
def test_stretches_of_shards_are_whole_huge_pages_and_each_is_of_one(precision: Precision, num_shards: int) -> None:
    plan, layout = planned_large(precision, num_shards)
    sizes = arena_sizes(plan, layout)
    parts = [shard_layout(plan, layout, k) for k in range(num_shards)]
    ranges = [list(shard_ranges(plan, part, sizes)) for part in parts]
    owners: dict[int, int] = {}
    for k, of_shard in enumerate(ranges):
        assert {s.arena for s in of_shard} <= {WORKING, state_arena(k), journal_arena(k)}
        assert ArenaRange(state_arena(k), 0, -(-sizes[state_arena(k)] // HUGE_PAGE) * HUGE_PAGE) in of_shard
        for stretch in of_shard:
            assert stretch.start % HUGE_PAGE == stretch.stop % HUGE_PAGE == 0
            if stretch.arena == WORKING:
                for page in range(stretch.start, stretch.stop, HUGE_PAGE):
                    assert owners.setdefault(page, k) == k, "two shards have one page"
    assert sorted(owners) == list(range(0, -(-sizes[WORKING] // HUGE_PAGE) * HUGE_PAGE, HUGE_PAGE)), "and each has one"
    assert set(owners.values()) == set(range(num_shards))
    item = plan.precision.working_dtype.itemsize
    for page, k in owners.items():  # whose the first byte is
        starts = parts[k].working_starts
        inside = (starts[i] * item <= page < (starts[i] + layout.layers[i].size) * item for i in range(len(starts)))
        [layer] = [i for i, found in enumerate(inside) if found]
        assert parts[k].spans[layer].start <= page // item - starts[layer] < parts[k].spans[layer].stop


def mapped(holder: ArenaHolder, names: tuple[str, ...]) -> dict[str, Arena]:
    return {name: holder.map(name) for name in names}


def test_a_shard_and_the_gpu_worker_settle_and_are_read_back() -> None:
    plan, layout = planned_large(Precision.BF16, 2)
    plan = replace(
        plan,
        shards=replace(plan.shards, homes=(HERE, HERE)),
        hosts=replace(plan.hosts, gpu_homes=(GpuHome(None, HERE),)),
    )
    with closing(ArenaHolder.create(arena_sizes(plan, layout))) as holder:
        arenas = mapped(holder, (WORKING, SLAB, state_arena(1), journal_arena(1)))
        assert bind_shard(plan, shard_layout(plan, layout, 1), arenas, pinned=False) == ()
        assert bind_gpu_worker(plan, arenas, 0, pinned=False) == ()
        arenas[state_arena(1)].buffer[0] = arenas[SLAB].buffer[5000] = 1
        assert pages_of(os.getpid())[SLAB] == {0: 1}
        places = list(page_placements(plan, {shard_name(1): os.getpid(), GPU: os.getpid()}))
        for arena in arenas.values():
            arena.close()
    assert [(p.process, p.arena, sum(p.found.values()), p.is_good) for p in places] == [
        (shard_name(1), WORKING, 0, True),
        (shard_name(1), state_arena(1), 1, True),
        (shard_name(1), journal_arena(1), 0, True),
        (GPU, SLAB, 1, True),
    ]
    assert str(places[0]) == "optimizer shard 1, working: no page is touched yet"
    assert str(places[3]) == "GPU worker, slab: node 0 100.0% (plan: node 0)"


def test_pages_elsewhere_are_told() -> None:
    places = PagePlacement(shard_name(0), state_arena(0), (0,), {0: 90, 1: 10})
    assert (places.planned_share, places.is_good) == (0.9, False)
    assert str(places) == "optimizer shard 0, state-0: node 0 90.0%, node 1 10.0% (plan: node 0)"


def test_a_refusal_is_one_sentence_and_no_end() -> None:
    plan, layout = planned_large(Precision.BF16, 2)
    plan = replace(
        plan,
        shards=replace(plan.shards, homes=(NOWHERE, NOWHERE)),
        hosts=replace(plan.hosts, gpu_homes=(GpuHome(None, NOWHERE),)),
    )
    with closing(ArenaHolder.create(arena_sizes(plan, layout))) as holder:
        arenas = mapped(holder, (WORKING, SLAB, state_arena(0), journal_arena(0)))
        problems = {
            *bind_shard(plan, shard_layout(plan, layout, 0), arenas, pinned=False),
            *bind_gpu_worker(plan, arenas, 0, pinned=False),
        }
        for arena in arenas.values():
            arena.close()
    [problem] = problems
    assert problem.startswith("the kernel does not take memory from node 60 (mbind: Invalid argument), so pages are")


def test_on_one_node_the_kernel_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError(f"asked: {arguments}")

    monkeypatch.setattr(numa_policy, "_call", asked)
    monkeypatch.setattr(numa_binding, "take_from", asked)
    monkeypatch.setattr(numa_binding, "pin_process", asked)
    plan, layout = planned_large(Precision.BF16, 2, num_nodes=1)
    assert bind_shard(plan, shard_layout(plan, layout, 0), {}, pinned=True) == ()
    assert bind_gpu_worker(plan, {}, 0, pinned=True) == ()
    assert list(page_placements(plan, {shard_name(0): os.getpid()})) == []
