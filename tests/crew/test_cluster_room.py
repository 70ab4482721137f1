"""What a cluster lacks is said at once, by name and number; driver and actors are on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from megatrain_ray.crew.placement import ActorsSpec, Placement
from megatrain_ray.crew.ray_resources import check_device, check_node, lacking, place_here, this_node
from megatrain_ray.errors import CapacityError, ConfigError, DeadlineError, MegatrainError
from tests.support.runs import cli_here, config, write_config
from tests.support.tiny import build_tiny

BUNDLES = [{"CPU": 0.1, "GPU": 1.0}, {"CPU": 0.1}, {"CPU": 0.1}]


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    there = {"node:__internal_head__": 1.0, f"node:{address}": 1.0, **resources}
    return {"NodeManagerAddress": address, "Resources": there, "Alive": alive}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"CPU": 8.0}, "lacks GPU on this machine: the run asks for 1, the node 10.0.0.1 has 0; start its Ray with "),
        ({"CPU": 0.2, "GPU": 1.0}, "lacks CPU on this machine: the run asks for 0.3, the node 10.0.0.1 has 0.2; "),
    ],
)
def test_the_resource_that_is_not_there_is_named(there: dict[str, float], said: str) -> None:
    here = node("10.0.0.1", **there)
    with pytest.raises(CapacityError) as caught:
        check_node(BUNDLES, [here], here)
    assert said in str(caught.value)


def test_enough_is_enough_however_floats_add_up() -> None:
    here = node("10.0.0.1", CPU=0.3, GPU=1.0)
    check_node(BUNDLES, [here], here)


def test_another_machine_that_has_it_is_named_if_it_lives() -> None:
    here, there = node("10.0.0.1", CPU=8.0), node("10.0.0.2", CPU=8.0, GPU=1.0)
    with pytest.raises(CapacityError, match=r"10\.0\.0\.2 has: start the driver there"):
        check_node(BUNDLES, [here, there], here)
    with pytest.raises(CapacityError, match="start its Ray with --num-gpus=1"):
        check_node(BUNDLES, [here, {**there, "Alive": False}], here)


def test_auto_does_not_train_on_the_cpu_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("10.0.0.1", CPU=8.0), node("10.0.0.2", CPU=8.0, GPU=1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(ConfigError, match=r"hardware\.device: torch sees no GPU .* on 10\.0\.0\.2"):
        check_device("auto", "cpu")
    check_device("cpu", "cpu")
    check_device("auto", "cuda")
    nodes.pop()
    check_device("auto", "cpu")


def test_all_bundles_are_placed_where_the_driver_is() -> None:
    placed = place_here(BUNDLES, node("10.0.0.1", CPU=8.0, GPU=1.0))
    assert placed == [{"CPU": 0.1, "GPU": 1.0, "node:10.0.0.1": 0.001}, *BUNDLES[1:]]


def test_what_is_in_use_is_named() -> None:
    assert lacking(BUNDLES, {"CPU": 4.0}) == "GPU (1 asked for, 0 free)"
    assert lacking(BUNDLES, {"CPU": 0.25, "GPU": 1.0}) == "CPU (0.3 asked for, 0.25 free)"


@contextmanager
def taken(**resources: float) -> Iterator[None]:
    """Take these resources of the cluster during the block, as somebody else would."""
    group = placement_group([resources])
    assert group.wait(60)
    try:
        yield
    finally:
        remove_placement_group(group)


def test_a_full_cluster_is_waited_for_and_said(ray_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with taken(CPU=4.0):
        placement = Placement(ActorsSpec(2, "cpu"))
        with closing_placement(placement), pytest.raises(DeadlineError, match=r"no room within 0 s: CPU \(0\.3 asked"):
            placement.wait(soon_s=0.0, timeout_s=0.0)
    assert "waiting for room in the Ray cluster: CPU (0.3 asked for, " in capsys.readouterr().err


def test_a_full_cluster_whose_processes_died_is_not_waited_for(ray_address: str) -> None:
    def died() -> None:
        raise MegatrainError("a process of Ray's died")

    with taken(CPU=4.0):
        placement = Placement(ActorsSpec(2, "cpu"))
        with closing_placement(placement):
            with pytest.raises(MegatrainError, match="Ray's died"):
                placement.wait(check=died)
            placement.clear()  # as when the raylet has died
            with pytest.raises(MegatrainError, match="Ray's died"):
                placement.wait(check=died)
            with pytest.raises(MegatrainError, match="the Ray cluster dropped the request for room: "):
                placement.wait()


def test_a_run_ends_with_the_ray_node_of_its_driver(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends with its driver's node, in a cluster that it did not start: a dead node can start nothing again."""
    placement = Placement(ActorsSpec(1, "cpu"))
    with closing_placement(placement):
        placement.wait()
        placement.check_hosts()
        dead = {**this_node(), "Alive": False}
        monkeypatch.setattr(ray, "nodes", lambda: [dead])
        with pytest.raises(MegatrainError, match="Ray's node on this machine died; the same command resumes"):
            placement.check_hosts()


@contextmanager
def closing_placement(placement: Placement) -> Iterator[None]:
    try:
        yield
    finally:
        placement.clear()


def group_of(actor: Any) -> str:
    """Asked in the actor's process."""
    from ray.util import get_current_placement_group

    return str(get_current_placement_group().id.hex())


def test_every_actor_is_in_the_group_on_this_machine(ray_address: str) -> None:
    """An arena owner elsewhere could not share its memory."""
    placement = Placement(ActorsSpec(1, "cpu"))
    with closing_placement(placement):
        placement.wait()
        actors = [placement.take(name) for name in ("data", "arena owner", "optimizer shard 0", "GPU worker")]
        group = placement._group
        assert placement_group_table(group)["strategy"] == "STRICT_PACK"
        assert placement_group_table(group)["bundles"][0][f"node:{this_node()['NodeManagerAddress']}"] == 0.001
        assert {ray.get(actor.__ray_call__.remote(group_of), timeout=60) for actor in actors} == {group.id.hex()}


def test_a_run_that_finds_no_cpu_or_memory_exits_3(ray_address: str, tmp_path: Path) -> None:
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"))
    path = str(write_config(tmp_path / "config.yaml", tree))
    done = cli_here("train", path, "hardware.num_shards=60")
    assert done.returncode == 3
    assert "error: the Ray cluster lacks CPU on this machine: the run asks for 6.1, the node " in done.stderr
    done = cli_here("train", path, "hardware.ram_limit=1MB")
    assert done.returncode == 3
    assert "of host RAM, 976.56 KiB available" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_finds_no_gpu_is_told_so(ray_address: str) -> None:
    with pytest.raises(CapacityError, match=r"lacks GPU on this machine: the run asks for 1, the node .* has 0"):
        Placement(ActorsSpec(1, "cuda"))
