"""Several hosts, as Ray nodes on one machine, have the losses of one.

Saves go from any number to any other, and a host may die.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_campaign.live_run import LiveRun
from megatrain_ray.io.saves.save_folder import list_saves, load_manifest
from tests.support.gpu_runs import CLOSE, NO_DROPOUT, SHAPE, held_out, settings, trained, worst
from tests.support.in_process import IN_PROCESS
from tests.support.ray_head import end_family
from tests.support.ray_nodes import Nodes, actors_of, ray_nodes
from tests.support.runs import TIMEOUT_S, assert_same_masters, cli, command, losses, plan_of, rows, write_config
from tests.support.spilling import spilling_settings, with_all_on_disk
from tests.support.tiny import TEXT

SECOND, THIRD = "127.0.0.2", "127.0.0.3"
END_S = 150.0


class Cluster:
    """Holds two nodes, on which runs train."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.second = nodes.join(SECOND)

    @property
    def environment(self) -> dict[str, str]:
        return {**self.nodes.environment, "RAY_ADDRESS": self.nodes.address}

    def train(self, run_dir: Path, num_gpus: int, num_hosts: int, **changes: Any) -> Path:
        tree = settings(run_dir, num_gpus, hardware__num_hosts=num_hosts, **changes)
        done = cli("train", str(write_config(run_dir.with_suffix(".yaml"), tree)), **self.environment)
        assert done.returncode == 0, done.stderr
        return run_dir


@pytest.fixture(scope="module", params=[pytest.param(2, marks=[pytest.mark.ray, pytest.mark.long], id="two nodes")])
def cluster() -> Iterator[Cluster]:
    with ray_nodes() as nodes:
        yield Cluster(nodes)


def test_two_hosts_compute_what_one_gpu_does(tmp_path: Path) -> None:
    changes = of_two_hosts(tmp_path)
    one = trained(IN_PROCESS, tmp_path / "one", 1, **changes)
    assert_two_are_one(trained(IN_PROCESS, tmp_path / "two", 2, hardware__num_hosts=2, **changes), one)


def test_two_nodes_compute_what_one_gpu_does(tmp_path: Path, cluster: Cluster) -> None:
    changes = of_two_hosts(tmp_path)
    one = trained(IN_PROCESS, tmp_path / "one", 1, model__config=SHAPE, **changes)
    assert_two_are_one(cluster.train(tmp_path / "two", 2, 2, **changes), one)


def of_two_hosts(folder: Path) -> dict[str, Any]:
    """Return settings of which one host has none of the held-out data, and each has two shards."""
    (folder / "held_out.txt").write_text(TEXT.read_text()[:170])
    return {"eval_every": 5, "data__eval_path": str(folder / "held_out.txt"), "hardware__num_shards": 2}


def assert_two_are_one(two: Path, one: Path) -> None:
    plan, of_one = plan_of(two), plan_of(one)
    assert (plan.hosts.num_gpus, plan.hosts.num_hosts, plan.batch_size, plan.step.num_micro_batches) == (2, 2, 12, 3)
    assert plan.gradients.slab_bytes == of_one.gradients.slab_bytes // 2
    halves = {
        row.name: (row.num_bytes, whole.num_bytes)
        for row, whole in zip(plan.memory_items, of_one.memory_items, strict=False)
    }
    for name in ("working copy", "optimizer state", "gradients in waiting"):
        mine, whole = halves[name]
        assert mine == whole // 2, name
    assert losses(two)[0] == losses(one)[0], "dropout is that of the micro-batch, wherever it is computed"
    assert worst(two, one) < CLOSE
    assert worst(two, one, "grad_norm") < CLOSE
    assert held_out(two) == pytest.approx(held_out(one), rel=CLOSE)
    assert_same_masters(two, one, rtol=1e-4, atol=1e-5)


def test_a_save_goes_on_with_other_hosts_and_gpus(tmp_path: Path, cluster: Cluster) -> None:
    """Two GPUs on each of two hosts, one alone, one on each of two hosts; some layers live on the devices."""
    constant = {"train__schedule": "constant", "model__config": NO_DROPOUT, "hardware__hbm_layers": 2}
    whole = cluster.train(tmp_path / "whole", 1, 1, train__steps=9, **constant)
    for num_gpus, num_hosts, steps in ((4, 2, 3), (1, 1, 6), (2, 2, 9)):
        free = {"train__micro_batch_size": None, "train__accumulate": None}
        run_dir = cluster.train(tmp_path / "run", num_gpus, num_hosts, train__steps=steps, **constant | free)
        assert (plan_of(run_dir).hosts.num_gpus, plan_of(run_dir).hosts.num_hosts) == (num_gpus, num_hosts)
    assert worst(run_dir, whole) < CLOSE


def test_an_adapter_of_several_hosts_goes_on_upon_the_same_base(tmp_path: Path, cluster: Cluster) -> None:
    """A save leaves the base out; a host with all of it makes sure that it is the same."""
    changes = {
        "lora": {"match": r"\.(q|down)_proj$", "rank": 4},
        "model__config": NO_DROPOUT,
        "train__schedule": "constant",
    }
    whole = cluster.train(tmp_path / "whole", 1, 1, train__steps=6, **changes)
    for num_gpus, num_hosts, steps in ((2, 2, 3), (1, 1, 5), (2, 2, 6)):
        run_dir = cluster.train(tmp_path / "run", num_gpus, num_hosts, train__steps=steps, **changes)
    manifests = [load_manifest(run_dir / "saves", 6) for run_dir in (run_dir, whole)]
    ours, theirs = ([layer.base_crc32 for layer in manifest.layers] for manifest in manifests)
    assert any(ours)
    assert ours == theirs
    assert worst(run_dir, whole) < CLOSE


def test_two_hosts_with_a_disk_compute_what_they_do_in_memory(tmp_path: Path, cluster: Cluster) -> None:
    """Each has its share of gradients and state there, and its own GPU's activations."""
    two = {"hardware__num_hosts": 2, "hardware__num_shards": 2, "train__steps": 4}
    folders = [tmp_path / name for name in ("memory", "disk")]
    for folder in folders:
        folder.mkdir()
    in_memory, spilling = (spilling_settings(folder, **two) for folder in folders)
    for folder, tree in zip(folders, (in_memory, with_all_on_disk(folders[1], spilling)), strict=True):
        done = cli("train", str(write_config(folder / "config.yaml", tree)), **cluster.environment)
        assert done.returncode == 0, done.stderr
    plan = plan_of(folders[1] / "run")
    assert plan.disk_activations and plan.spilled_layers and plan.gradients_on_disk and not plan.weights_on_disk
    assert not list((folders[1] / "spill").iterdir())
    assert losses(folders[1] / "run") == losses(folders[0] / "run")
    assert_same_masters(folders[1] / "run", folders[0] / "run")


LONG = {"train__steps": 60, "save_every": 4, "model__config": NO_DROPOUT}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return losses(trained(IN_PROCESS, run_dir, 2, hardware__num_hosts=2, **LONG))


def disturbed(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], None]
) -> tuple[str, list[float]]:
    """Return what a run prints, and its losses. `disturb`: called once there is a save, while steps are made."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    tree = settings(tmp_path / "run", 2, hardware__num_hosts=2, **LONG)
    path = write_config(tmp_path / "config.yaml", tree)
    run = LiveRun(command("train", str(path)), tmp_path / "run", tmp_path / "output.txt")
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not list_saves(tmp_path / "run" / "saves"):
            assert not run.over and time.monotonic() < deadline_s, run.text()
            time.sleep(0.01)
        disturb()
        assert run.process.wait(END_S) == 0, run.text()
        assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 61))
        return run.text(), losses(tmp_path / "run")
    finally:
        run.close()


@pytest.mark.parametrize(
    ("kind", "name"), [("ShardWorker", "optimizer shard 1"), ("ArenaOwner", "arena owner of host 1")]
)
def test_who_dies_on_the_second_host_is_replaced_there(
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[float],
    kind: str,
    name: str,
) -> None:
    def kill() -> None:
        for pid in actors_of(cluster.second, kind):
            os.kill(pid, signal.SIGKILL)

    text, found = disturbed(tmp_path, cluster, monkeypatch, kill)
    assert f"{name} died and was replaced in " in text
    assert found == undisturbed


def test_a_gpu_worker_of_the_second_host_that_dies_is_made_good(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, undisturbed: list[float]
) -> None:
    """The step is made once more, or the run goes on from the last save if the step's update was already committed."""

    def kill() -> None:
        for pid in actors_of(cluster.second, "GpuActor"):
            os.kill(pid, signal.SIGKILL)

    text, found = disturbed(tmp_path, cluster, monkeypatch, kill)
    assert "GPU worker died and was replaced in " in text or "; going on from the save of step " in text
    assert found == undisturbed


def test_a_host_that_is_gone_is_replaced_by_another_node(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, undisturbed: list[float]
) -> None:
    """All begin again from the last save, where there are as many nodes as before."""

    def kill() -> None:
        end_family(cluster.second)
        cluster.second = cluster.nodes.join(THIRD)

    text, found = disturbed(tmp_path, cluster, monkeypatch, kill)
    assert "the Ray node of host 1 of 2 is gone; going on from the save of step " in text
    assert found == undisturbed


def test_more_hosts_than_there_are_nodes(tmp_path: Path, cluster: Cluster) -> None:
    tree = settings(tmp_path / "run", 3, hardware__num_hosts=3)
    done = cli("train", str(write_config(tmp_path / "config.yaml", tree)), **cluster.environment)
    assert done.returncode == 3
    assert "hardware.num_hosts: 3, and 2 of the Ray cluster's nodes have what a host needs (CPU: 0.2): " in done.stderr
    assert not (tmp_path / "run").exists()


def test_several_hosts_without_a_cluster(tmp_path: Path) -> None:
    tree = settings(tmp_path / "run", 2, hardware__num_hosts=2)
    done = cli("train", str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 2
    assert (
        "hardware.num_hosts: 2, and there is no Ray cluster: start Ray on every host and set RAY_ADDRESS" in done.stderr
    )
    assert not (tmp_path / "run").exists()
