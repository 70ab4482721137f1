"""NUMA nodes read from trees of files, and which process works where on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from megatrain_ray.config.groups import NodeConfig
from megatrain_ray.engine.device.numa_homes import Gpu, Home, NumaNode, fewest_cpus, gpu_homes, shard_homes
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.numa_topology import Topology, named_nodes, read_topology
from megatrain_ray.units import format_ranges, parse_ranges
from tests.support import machines
from tests.support.machines import GIB, plant
from tests.support.settings import config

EVERY_CPU = frozenset(range(256))


def read(root: Path, files: Mapping[str, str], allowed: Iterable[int] = EVERY_CPU) -> Topology:
    return read_topology(plant(root, files), frozenset(allowed))


def described(nodes: Iterable[NumaNode]) -> list[str]:
    """Return a line for each node: number, CPUs, and @ the node that memory is taken from."""
    return [f"{n.number}: {format_ranges(cpu for core in n.cores for cpu in core)} @{n.memory}" for n in nodes]


TREES: dict[str, tuple[Mapping[str, str], list[str], list[str]]] = {
    # name: (files, usable nodes, homes of as many shards)
    "one node": (machines.ONE, ["0: 0-15 @0"], []),
    "two sockets": (
        machines.TWO_SOCKETS,
        ["0: 0-15,32-47 @0", "1: 16-31,48-63 @1"],
        ["node 0 (32 CPUs)", "node 1 (32 CPUs)"],
    ),
    "four": (
        machines.FOUR,
        ["0: 0-15 @0", "1: 16-31 @1", "2: 32-47 @2", "3: 48-63 @3"],
        [f"node {k} (16 CPUs)" for k in range(4)],
    ),
    "eight": (
        machines.EIGHT,
        [f"{k}: {8 * k}-{8 * k + 7} @{k}" for k in range(8)],
        [f"node {k} (8 CPUs)" for k in range(8)],
    ),
    "memory only": (machines.MEMORY_ONLY, ["0: 0-7 @0", "1: 8-15 @1"], ["node 0 (8 CPUs)", "node 1 (8 CPUs)"]),
    "gaps and offline": (machines.GAPS, ["0: 0-7 @0", "8: 16-23 @8"], ["node 0 (8 CPUs)", "node 8 (8 CPUs)"]),
    "no memory in a node": (
        machines.MEMORYLESS,
        ["0: 0-3 @1", "1: 4-7 @1", "2: 8-11 @2"],
        ["node 0 (4 CPUs, memory of node 1)", "node 1 (4 CPUs)", "node 2 (4 CPUs)"],
    ),
    "a container that hides them": (machines.CONTAINER, [], []),
    "a cpuset of one node, v2": (machines.CPUSET_V2, ["1: 16-31 @1"], []),
    "a cpuset of parts of both, v1": (
        machines.CPUSET_V1,
        ["0: 0-7 @0", "1: 16-23 @1"],
        ["node 0 (8 CPUs)", "node 1 (8 CPUs)"],
    ),
    "memory of one node": (
        machines.MEMS_RESTRICTED,
        ["0: 0-15,32-47 @0", "1: 16-31,48-63 @0"],
        ["node 0 (32 CPUs)", "node 1 (32 CPUs, memory of node 0)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_trees(tmp_path: Path, name: str) -> None:
    files, usable, homes = TREES[name]
    nodes = read(tmp_path, files).usable
    assert described(nodes) == usable
    assert list(map(str, shard_homes(nodes, max(1, len(nodes))))) == homes


def test_memory_and_distances(tmp_path: Path) -> None:
    nodes = read(tmp_path, machines.MEMORY_ONLY).nodes
    assert [(node.number, bool(node.cpus), node.total_bytes // GIB, node.free_bytes // GIB) for node in nodes] == [
        (0, True, 64, 32), (1, True, 64, 32), (2, False, 256, 128), (3, False, 256, 128),
    ]  # fmt: skip
    assert nodes[0].distances == {0: 10, 1: 21, 2: 14, 3: 24}
    numbered = read(tmp_path / "gaps", machines.GAPS).nodes
    assert [dict(node.distances) for node in numbered] == [{0: 10, 8: 40}, {0: 40, 8: 10}]


def test_affinity_bounds_cpus(tmp_path: Path) -> None:
    assert described(read(tmp_path, machines.TWO_SOCKETS, range(4)).usable) == ["0: 0-3 @0"]
    assert described(read(tmp_path, machines.TWO_SOCKETS, [0, 16, 17]).usable) == ["0: 0 @0", "1: 16-17 @1"]


def test_hyper_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    nodes = read(tmp_path, machines.TWO_SOCKETS).usable
    assert nodes[0].cores[:2] == ((0, 32), (1, 33))
    assert [home.cpus for home in shard_homes(nodes, 4)] == ["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"]


def node(number: int, cpus: str) -> NumaNode:
    return NumaNode(number, tuple((cpu,) for cpu in parse_ranges(cpus)), number)


def test_more_shards_than_nodes_share_them() -> None:
    nodes = node(0, "0-3"), node(1, "4-7")
    assert list(map(str, shard_homes(nodes, 3))) == ["node 0 (2 CPUs)", "node 0 (2 CPUs)", "node 1 (4 CPUs)"]
    assert [home.cpus for home in shard_homes(nodes, 3)] == ["0-1", "2-3", "4-7"]
    assert fewest_cpus(shard_homes(nodes, 3)) == 2
    crowded = shard_homes(nodes, 16)
    assert [home.cpus for home in crowded] == [str(k // 2) for k in range(16)]


def test_fewer_shards_than_nodes_have_several() -> None:
    nodes = tuple(node(k, f"{2 * k}-{2 * k + 1}") for k in range(4))
    assert shard_homes(nodes, 2) == (Home((0, 1), "0-3", (0, 1)), Home((2, 3), "4-7", (2, 3)))
    assert list(map(str, shard_homes(nodes, 1))) == ["nodes 0-3 (8 CPUs)"]
    assert [home.nodes for home in shard_homes(nodes, 3)] == [(0,), (1,), (2, 3)]


@pytest.mark.parametrize("num_shards", [1, 2, 7])
def test_on_one_node_nothing_is_put_anywhere(num_shards: int) -> None:
    assert shard_homes((node(0, "0-7"),), num_shards) == shard_homes((), num_shards) == ()
    assert gpu_homes((node(0, "0-7"),), (Gpu(None, 0),)) == ()


def test_nodes_by_hand(tmp_path: Path) -> None:
    found = read(tmp_path, machines.ONE)
    settings = config(hardware__nodes=[{"cpus": "0-3", "memory": 0}, {"cpus": "4-7", "memory": 0, "gpu": True}])
    assert described(named_nodes(settings.hardware.nodes, found)) == ["0: 0-3 @0", "1: 4-7 @0"]
    assert described(named_nodes([NodeConfig(cpus=5)], found)) == ["0: 5 @0"]


def test_nodes_that_are_not_here_are_for_plans_alone(tmp_path: Path) -> None:
    found = read(tmp_path, machines.ONE, range(16))
    with pytest.raises(ConfigError, match=r"hardware.nodes.0.cpus: 14-17: this process may not use 16-17, only 0-15"):
        named_nodes([NodeConfig(cpus="14-17")], found)
    nodes = [NodeConfig(cpus="0-3"), NodeConfig(cpus="4-7")]
    with pytest.raises(ConfigError, match=r"hardware.nodes.1.memory: the kernel has no node 1 .* expected one of 0"):
        named_nodes(nodes, found)
    assert described(named_nodes(nodes, found, imagined=True)) == ["0: 0-3 @0", "1: 4-7 @1"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"cpus": "0-3"}, {"cpus": "3-4"}], "hardware.nodes.1.cpus: 3 is of hardware.nodes.0 too"),
        ([{"cpus": "0", "gpu": True}, {"cpus": "1", "gpu": True}], "hardware.nodes.1.gpu: hardware.nodes.0 has it too"),
        (
            [{"cpus": "0", "gpus": "0-2"}, {"cpus": "1", "gpus": "2-3"}],
            "hardware.nodes.1.gpus: 2 is of hardware.nodes.0 too; each is attached to one",
        ),
        (
            [{"cpus": "0", "gpus": 0}, {"cpus": "1", "gpu": True}],
            "hardware.nodes: gpu: true is all GPUs, and gpus some of them; give one of the two keys alone",
        ),
        ([{"cpus": "0", "gpus": []}], "hardware.nodes.0.gpus: expected GPUs, as in 0-3; got []"),
        ([{"cpus": "3-1"}], "hardware.nodes.0.cpus: expected numbers and ranges, as in 0-3,8; got '3-1'"),
        ([{"cpus": ""}], "hardware.nodes.0.cpus: expected CPUs, as in 0-15,32-47; got ''"),
        ([{"cpus": "0", "mem": 0}], "hardware.nodes.0.mem: unknown key"),
    ],
)
def test_wrong_nodes_are_refused(nodes: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(hardware__nodes=nodes)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8", "1,3,5-7"])
def test_ranges(text: str) -> None:
    assert format_ranges(parse_ranges(text)) == text


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "0-", "0-99999999999"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="expected numbers and ranges"):
        parse_ranges(text)
