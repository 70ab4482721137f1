"""Two GPU workers on one host with activations, gradients and state on disk have the bits of a run in memory.

Runs go through the CLI and real Ray. Saves go from one kind of run to the other, and processes may die.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_campaign.cases import BACKWARD, GPU, SHARD_0, SHARD_1
from benchmarks.kill_campaign.live_run import LiveRun
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from tests.support.fault_injection import END_S, SECOND_SAVE, kill, mid_update, training
from tests.support.in_process import Train
from tests.support.runs import assert_same_masters, losses, plan_of, rows, write_config
from tests.support.spilling import SHAPE, assert_traffic_is_as_planned, spilling_settings, with_all_on_disk


def trained(train: Train, folder: Path, tree: Mapping[str, Any], **changes: Any) -> Plan:
    path = write_config(folder / "config.yaml", {**tree, "train": {**tree["train"], **changes}})
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    return plan_of(Path(tree["run_dir"]))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of a run in memory, and of one with a disk."""
    for folder in (found := (tmp_path / "memory", tmp_path / "disk")):
        folder.mkdir()
    return found


@pytest.mark.long
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "changes",
    [{"hardware__num_shards": 2}, {"train__precision": "bf16", "train__clip": None}],
    ids=["fp32, two shards", "bf16, no clipping"],
)
def test_two_gpus_with_a_disk_compute_what_they_do_in_memory(
    folders: tuple[Path, Path], train: Train, changes: dict[str, Any]
) -> None:
    in_memory, spilling = (spilling_settings(folder, train__steps=6, **changes) for folder in folders)
    assert trained(train, folders[0], in_memory).total_bytes(Tier.NVME) == 0
    plan, run_dir = trained(train, folders[1], with_all_on_disk(folders[1], spilling)), folders[1] / "run"
    assert (plan.hosts.num_gpus, len(plan.spilled_layers), len(plan.disk_activations)) == (2, 18, 16)
    assert bool(plan.gradients_on_disk) == ("train__clip" not in changes)
    assert not plan.weights_on_disk
    assert not list((folders[1] / "spill").iterdir())
    assert rows(run_dir)[0]["host_bytes"] <= plan.total_bytes(Tier.HOST)
    assert_traffic_is_as_planned(run_dir, plan)
    assert losses(run_dir) == losses(folders[0] / "run")
    assert_same_masters(run_dir, folders[0] / "run")


@pytest.mark.long
def test_a_save_goes_on_where_things_live_elsewhere(folders: tuple[Path, Path], train: Train) -> None:
    """A run goes on from disk to memory and back, with a process each."""
    whole, common = (spilling_settings(folder) for folder in folders)
    spilling = with_all_on_disk(folders[1], common)
    trained(train, folders[0], whole, steps=6)
    for tree, steps in ((spilling, 2), (common, 4), (spilling, 6)):
        plan = trained(train, folders[1], tree, steps=steps)
        assert bool(plan.disk_activations) == bool(plan.spilled_layers) == (tree is spilling)
    assert losses(folders[1] / "run") == losses(folders[0] / "run")


WIDE = {**SHAPE, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6}  # updates that can be met


def disturbed(folders: tuple[Path, Path], disturb: Callable[[LiveRun], object], **changes: Any) -> tuple[str, Plan]:
    """Return what a run with a disk prints, and its plan.

    Its losses must be those of an undisturbed run in memory.
    """
    in_memory, spilling = (spilling_settings(folder, max_failures=4, **changes) for folder in folders)
    with training(folders[0], write_config(folders[0] / "config.yaml", in_memory)) as run:
        assert run.process.wait(END_S) == 0, run.text()
    tree = with_all_on_disk(folders[1], spilling)
    with training(folders[1], write_config(folders[1] / "config.yaml", tree)) as run:
        disturb(run)
        assert run.process.wait(END_S) == 0, run.text()
        assert run.processes.await_end(5.0) == []
    assert not list((folders[1] / "spill").iterdir())
    assert losses(folders[1] / "run") == losses(folders[0] / "run")
    return run.text(), plan_of(folders[1] / "run")


@pytest.mark.ray
@pytest.mark.long
def test_shards_that_die_while_two_gpus_train_are_replaced(folders: tuple[Path, Path]) -> None:
    """What waits on disk outlives the GPU workers as little as what is in the slab: all start again from the save."""

    def disturb(run: LiveRun) -> None:
        kill(run, mid_update(0), SHARD_0)
        kill(run, BACKWARD, SHARD_1)
        kill(run, SECOND_SAVE, GPU)

    changes = {"model__config": WIDE, "data__seq_len": 32, "hardware__num_shards": 2}
    text, plan = disturbed(folders, disturb, train__steps=24, save_every=4, **changes)
    assert plan.spilled_layers and plan.gradients_on_disk
    for shard in range(2):
        assert f"optimizer shard {shard} died and was replaced in " in text
    assert "; going on from the save of step " in text


@pytest.mark.ray
@pytest.mark.long
def test_a_gpu_worker_that_dies_finds_the_files_of_activations_again(folders: tuple[Path, Path]) -> None:
    """Where no gradients wait on disk, and all state is with the shards, the step is made once more."""
    changes = {"train__steps": 12, "train__trainable": ["embed_tokens"]}
    text, plan = disturbed(folders, lambda run: kill(run, BACKWARD, GPU), **changes)
    assert plan.disk_activations and plan.repeats_steps
    assert "GPU worker died and was replaced in " in text
