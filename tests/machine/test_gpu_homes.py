"""The node of each GPU of a host, read from trees of files or given by hand, and where the worker of each then is."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_ray.commands import doctor_numa
from megatrain_ray.commands.doctor_numa import Severity, examine_nodes
from megatrain_ray.config.groups import HardwareConfig, NodeConfig
from megatrain_ray.engine.device.cuda_info import device_name, pci_addresses, total_memory_bytes
from megatrain_ray.engine.device.numa_homes import Gpu, GpuHome, Home, NumaNode, gpu_homes, home_at
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.arenas.arena_holder import Arena, ArenaHolder
from megatrain_ray.machine import machine
from megatrain_ray.machine.machine import machine_of
from megatrain_ray.machine.numa_topology import gpu_node, named_gpus
from megatrain_ray.report import page_placement
from megatrain_ray.report.page_placement import PagePlacement, own_pages_of
from megatrain_ray.run.run_processes import GPU, gpu_name
from megatrain_ray.workers import numa_binding
from megatrain_ray.workers.arenas import SLAB, arena_sizes
from megatrain_ray.workers.numa_binding import bind_gpu_worker
from tests.support import machines
from tests.support.machines import address, gpu_files, plant
from tests.workers.test_numa_binding import planned_large

MAP_NORESERVE = 0x4000  # of <sys/mman.h>
FIRST, SECOND = Home((0,), "0-3", (0,)), Home((1,), "4-7", (1,))
NODES = tuple(NumaNode(k, tuple((cpu,) for cpu in range(4 * k, 4 * k + 4)), k) for k in range(2))
FOUR = tuple(GpuHome(address(k), (FIRST, SECOND)[k // 2]) for k in range(4))  # two on each node


def see(monkeypatch: pytest.MonkeyPatch, addresses: Sequence[str | None]) -> None:
    """Has torch see GPUs there."""
    for module in (machine, numa_binding, doctor_numa):
        monkeypatch.setattr(module, "pci_addresses", lambda: tuple(addresses), raising=True)


def test_the_address_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """/sys has this name, which is made of torch's numbers; some versions of torch do not tell these."""
    told = [SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0), SimpleNamespace(total_memory=1)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told[index])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # so that what is set here is as before afterwards
    assert pci_addresses() == ("0000:1b:00.0", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pci_addresses() == ()


@pytest.mark.parametrize("question", [total_memory_bytes, device_name, pci_addresses])
def test_whoever_asks_first_what_a_gpu_is_has_segments_expand(
    monkeypatch: pytest.MonkeyPatch, question: Callable[[], object]
) -> None:
    """torch reads that with the first question."""
    read: list[str | None] = []

    def properties(index: int) -> SimpleNamespace:
        read.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
        return SimpleNamespace(total_memory=1, name="some GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    question()
    assert read == ["expandable_segments:True"]


def test_the_node_of_a_gpu(tmp_path: Path) -> None:
    root = plant(tmp_path, gpu_files([1, -1]))
    assert gpu_node(address(0).upper(), root) == 1
    for unknown in (address(1), "0000:ff:00.0", None):
        assert gpu_node(unknown, root) is None


CPUSET_OF_ONE = machines.FOUR | {"proc/self/status": "Cpus_allowed_list:\t0-47\nMems_allowed_list:\t0-2"}
TREES: dict[str, tuple[Mapping[str, str], Sequence[int], list[str]]] = {
    # name: (files, the node of each GPU by the kernel, home of each GPU)
    "two sockets, two GPUs each": (
        machines.TWO_SOCKETS,
        [0, 0, 1, 1],
        ["node 0 (32 CPUs)"] * 2 + ["node 1 (32 CPUs)"] * 2,
    ),
    "eight GPUs of four nodes": (
        machines.FOUR,
        [0, 0, 1, 1, 2, 2, 3, 3],
        [f"node {k // 2} (16 CPUs)" for k in range(8)],
    ),
    "eight GPUs of two nodes, as their buses are numbered": (
        machines.TWO_SOCKETS,
        [1, 1, 0, 0, 1, 1, 0, 0],
        [f"node {k} (32 CPUs)" for k in (1, 1, 0, 0, 1, 1, 0, 0)],
    ),
    "memory only": (machines.MEMORY_ONLY, [0, 1], ["node 0 (8 CPUs)", "node 1 (8 CPUs)"]),
    "a node without memory": (machines.MEMORYLESS, [0, 2], ["node 0 (4 CPUs, memory of node 1)", "node 2 (4 CPUs)"]),
    "of one nobody knows it": (machines.TWO_SOCKETS, [0, -1], ["node 0 (32 CPUs)", "None"]),
    "nobody knows any": (machines.TWO_SOCKETS, [-1, -1], []),
    "a cpuset without a GPU's node": (CPUSET_OF_ONE, [2, 3], ["node 2 (16 CPUs)", "None"]),
    "one node": (machines.ONE, [0, 0], []),
    "one GPU": (machines.TWO_SOCKETS, [1], ["node 1 (32 CPUs)"]),
}


@pytest.mark.parametrize("name", TREES)
def test_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files, nodes, homes = TREES[name]
    see(monkeypatch, [address(k) for k in range(len(nodes))])
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 80 << 30)
    monkeypatch.setattr(machine, "gpus_here", lambda: len(nodes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(256)))
    found = machine_of(
        HardwareConfig(device="auto", ram_limit=1 << 40), root=plant(tmp_path, {**files, **gpu_files(nodes)})
    )
    places = gpu_homes(found.nodes, found.gpus)
    assert [str(place.home) for place in places] == homes
    assert [place.address for place in places] == [address(k) for k in range(len(homes))]


def test_gpus_by_hand() -> None:
    here = [address(k) for k in range(4)]
    crossed = [NodeConfig(cpus="0", gpus="2-3"), NodeConfig(cpus="1", gpus="0")]
    assert named_gpus(crossed, here) == (Gpu(here[0], 1), Gpu(here[1], None), Gpu(here[2], 0), Gpu(here[3], 0))
    of_all = [NodeConfig(cpus="0"), NodeConfig(cpus="1", gpu=True)]
    assert named_gpus(of_all, here) == tuple(Gpu(there, 1) for there in here)
    assert named_gpus([NodeConfig(cpus="0")], [None]) == (Gpu(None, None),)
    with pytest.raises(ConfigError) as error:
        named_gpus(crossed, here[:2])
    expected = "hardware.nodes.0.gpus: 2-3 not found: a host of this run has GPUs 0-1, as torch numbers them"
    assert str(error.value) == expected
    assert [gpu.node for gpu in named_gpus(crossed, [None], imagined=True)] == [1, None, 0, 0]


def test_the_home_at_an_address() -> None:
    assert [home_at(FOUR, place.address) for place in FOUR] == [FIRST, FIRST, SECOND, SECOND]
    assert home_at((*FOUR, GpuHome("there", None)), "there") is None
    for other in ("there", None):
        assert home_at(FOUR, other) is None
        assert home_at(FOUR[:2], other) == FIRST, "all of them have it"


def planned(homes: Sequence[GpuHome], num_gpus: int, device: str = "cuda") -> Plan:
    plan, _ = planned_large(Precision.BF16, 2)
    return replace(
        plan,
        device=device,
        shards=replace(plan.shards, homes=(FIRST, SECOND)),
        hosts=replace(plan.hosts, gpu_homes=tuple(homes), num_gpus=num_gpus),
    )


@pytest.fixture
def arenas() -> Iterator[Mapping[str, Arena]]:
    plan, layout = planned_large(Precision.BF16, 2)
    with closing(ArenaHolder.create(arena_sizes(plan, layout))) as holder, closing(holder.map(SLAB)) as slab:
        yield {SLAB: slab}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that fills with what the kernel is asked for: CPUs of threads, and nodes of memory."""
    found: list[Any] = []
    monkeypatch.setattr(numa_binding, "pin_process", lambda cpus: found.append(sorted(cpus)) or "")
    monkeypatch.setattr(numa_binding, "take_from", lambda memory, nodes: found.append(tuple(nodes)))
    return found


def test_a_worker_goes_to_the_node_of_the_gpu_that_it_got(
    monkeypatch: pytest.MonkeyPatch, arenas: Mapping[str, Arena], asked: list[Any]
) -> None:
    """Whatever its number: the first one has got the last GPU here. The slab is on the nodes of all, in turn."""
    plan = planned(FOUR, 4)
    for number, gpu in enumerate((3, 0)):
        see(monkeypatch, [address(gpu)])
        assert bind_gpu_worker(plan, arenas, number, pinned=True) == ()
    assert asked == [[4, 5, 6, 7], (0, 1), [0, 1, 2, 3]]


def test_the_slab_of_the_only_worker_is_with_its_gpu(
    monkeypatch: pytest.MonkeyPatch, arenas: Mapping[str, Arena], asked: list[Any]
) -> None:
    see(monkeypatch, [address(2)])
    assert bind_gpu_worker(planned(FOUR, 1), arenas, 0, pinned=True) == ()
    assert asked == [[4, 5, 6, 7], (1,)]


def test_workers_of_the_cpu_device_are_gpus_by_their_number(arenas: Mapping[str, Arena], asked: list[Any]) -> None:
    plan = planned([replace(place, address=None) for place in FOUR], 4, device="cpu")
    for number in (2, 1):
        bind_gpu_worker(plan, arenas, number, pinned=True)
    assert asked == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_gpu_without_a_home_has_its_worker_run_anywhere(
    monkeypatch: pytest.MonkeyPatch, arenas: Mapping[str, Arena], asked: list[Any]
) -> None:
    """That is worth a line where the plan was made for other GPUs, as on a host that is not like the first one."""
    see(monkeypatch, ["0000:ff:00.0"])
    [problem] = bind_gpu_worker(planned(FOUR, 4), arenas, 1, pinned=True)
    assert problem == "the plan does not know the GPU at 0000:ff:00.0, so its worker runs on any CPUs"
    assert bind_gpu_worker(planned((*FOUR, GpuHome("0000:ff:00.0", None)), 4), arenas, 1, pinned=True) == ()
    see(monkeypatch, [None])
    nowhere = [replace(of_gpu, address=None) for of_gpu in FOUR]
    [problem] = bind_gpu_worker(planned(nowhere, 4), arenas, 1, pinned=True)
    assert problem == "the plan does not know the GPU at an unknown address, so its worker runs on any CPUs"
    assert asked == []


def test_plans_say_it_of_each_gpu() -> None:
    def gpu_lines(homes: Sequence[GpuHome], num_gpus: int) -> list[str]:
        lines = describe(planned(homes, num_gpus)).splitlines()
        return [line.partition("; GPU w")[2] or line for line in lines if "gradients that wait:" in line]

    first, second = "0-1 on node 0 (4 CPUs)", "2-3 on node 1 (4 CPUs)"
    several = f"GPUs      worker of {first}, {second}; gradients that wait: in turn on nodes 0-1"
    assert gpu_lines(FOUR, 4) == [several]
    assert gpu_lines(FOUR, 1) == [f"GPUs      worker of {first}, {second}; gradients that wait: with their GPU"]
    unknown = replace(FOUR[3], home=None)
    expected = (
        f"GPUs      worker of {first}, 2 on node 1 (4 CPUs), 3 on any node; gradients that wait: in turn on nodes 0-1"
    )
    assert gpu_lines((*FOUR[:3], unknown), 4) == [expected]
    assert gpu_lines(FOUR[:2], 2) == ["orkers and gradients that wait: node 0 (4 CPUs)"]
    assert gpu_lines(FOUR[:1], 1) == ["orker and gradients that wait: node 0 (4 CPUs)"]


def test_own_pages_are_those_of_large_mappings_of_no_file() -> None:
    """The mapping is address space only but for a page, and more of it than anything else in this process has."""
    min_bytes, large = 1 << 38, 1 << 39
    private = mmap.MAP_PRIVATE | MAP_NORESERVE
    assert own_pages_of(os.getpid(), min_bytes) == {}
    with (
        mmap.mmap(-1, large, flags=mmap.MAP_SHARED | MAP_NORESERVE) as shared,
        mmap.mmap(-1, min_bytes // 8, flags=private) as small,
    ):
        shared[0] = small[0] = 1
        assert own_pages_of(os.getpid(), min_bytes) == {}
        with mmap.mmap(-1, large, flags=private) as own:
            assert own_pages_of(os.getpid(), min_bytes) == {}, "nobody has touched it"
            own[0] = 1
            assert own_pages_of(os.getpid(), min_bytes) == {0: 1}


def test_pages_of_each_gpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPUs tell which GPU it got; what waits of its activations is looked for where that is something."""
    pids = {GPU: 1, gpu_name(1): 2, gpu_name(2): 3}
    cpus = {1: SECOND.cpu_set, 2: FIRST.cpu_set, 3: frozenset(range(8))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus[pid]))
    monkeypatch.setattr(page_placement, "pages_of", lambda pid: {SLAB: {0: 5, 1: 5}})
    monkeypatch.setattr(page_placement, "own_pages_of", lambda pid, min_bytes: {pid % 2: 100})
    plan = planned(FOUR, 4)
    slabs = [PagePlacement(name, SLAB, (0, 1), {0: 5, 1: 5}) for name in pids]
    assert list(page_placement.page_placements(plan, pids)) == slabs
    layers = tuple(replace(layer, kept=Tier.HOST, kept_bytes=page_placement.MIN_OWN_BYTES) for layer in plan.layers)
    places = list(page_placement.page_placements(replace(plan, layers=layers), pids))
    own = [place for place in places if place.arena == "activations"]
    assert own == [
        PagePlacement(GPU, "activations", (1,), {1: 100}),
        PagePlacement(gpu_name(1), "activations", (0,), {0: 100}),
    ]
    alone = next(page_placement.page_placements(replace(plan, hosts=replace(plan.hosts, num_gpus=1)), pids))
    assert str(alone) == "GPU worker, slab: node 0 50.0%, node 1 50.0% (plan: node 1)"


def test_doctor_names_the_node_of_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    root = plant(tmp_path / "root", {**machines.TWO_SOCKETS, **gpu_files([0, 1, -1])})

    def found(count: int) -> list[tuple[Severity, str]]:
        see(monkeypatch, [address(k) for k in range(count)])
        return [(x.severity, x.text) for x in examine_nodes(tmp_path, root) if x.topic == "NUMA GPUs"]

    text = f"GPU 0 ({address(0)}) on node 0, GPU 1 ({address(1)}) on node 1"
    assert found(0) == []
    assert found(2) == [(Severity.GOOD, text)]
    assert found(3) == [(Severity.NOTE, f"{text}, GPU 2 ({address(2)}) on node ?")]
