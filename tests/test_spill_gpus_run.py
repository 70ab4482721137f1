"""Two GPU workers on one host with activations, gradients and state on disk, through the CLI and real Ray: the bits of
a run in memory, saves that go from one to the other, and who dies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.tier import Tier
from tests.runs import cli_here, config, exported_masters, losses, plan_of, rows, write_config
from tests.spilling import with_all_on_disk
from tests.test_activations_run import assert_traffic_is_as_planned

pytestmark = pytest.mark.ray

SHAPE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of two GPUs, with two sequences an update each."""
    split = {"train__batch_size": 4, "train__micro_batch_size": 2, "train__accumulate": 1}
    two = {"hardware__num_gpus": 2, "train__schedule": "constant", "data__seq_len": 256}
    return config(folder / "run", SHAPE, **split | two | changes)


def trained(folder: Path, tree: Mapping[str, Any], **train: Any) -> Plan:
    path = write_config(folder / "config.yaml", {**tree, "train": {**tree["train"], **train}})
    done = cli_here("train", str(path))
    assert done.returncode == 0, done.stderr
    return plan_of(Path(tree["run_dir"]))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Of a run in memory, and of one with a disk."""
    for folder in (found := (tmp_path / "memory", tmp_path / "disk")):
        folder.mkdir()
    return found


@pytest.mark.parametrize(
    "changes",
    [{"hardware__num_shards": 2}, {"train__precision": "bf16", "train__clip": None}],
    ids=["fp32, two shards", "bf16, no clipping"],
)
def test_two_gpus_with_a_disk_compute_what_they_do_in_memory(
    folders: tuple[Path, Path], ray_address: str, changes: dict[str, Any]
) -> None:
    in_memory, spilling = (settings(folder, train__steps=6, **changes) for folder in folders)
    assert trained(folders[0], in_memory).total_bytes(Tier.NVME) == 0
    plan, run_dir = trained(folders[1], with_all_on_disk(folders[1], spilling)), folders[1] / "run"
    assert (plan.num_gpus, len(plan.spilled_layers), len(plan.disk_activations)) == (2, 18, 16)
    assert bool(plan.stored_layers) == ("train__clip" not in changes)
    assert not plan.weights_on_disk
    assert not list((folders[1] / "spill").iterdir())
    assert rows(run_dir)[0]["host_bytes"] <= plan.total_bytes(Tier.HOST)
    assert_traffic_is_as_planned(run_dir, plan)
    assert losses(run_dir) == losses(folders[0] / "run")
    theirs, ours = (exported_masters(folder / "run", folder / "out") for folder in folders)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_save_goes_on_where_things_live_elsewhere(folders: tuple[Path, Path], ray_address: str) -> None:
    """From disk to memory and back, a process each."""
    whole, common = (settings(folder) for folder in folders)
    spilling = with_all_on_disk(folders[1], common)
    trained(folders[0], whole, steps=6)
    for tree, steps in ((spilling, 2), (common, 4), (spilling, 6)):
        plan = trained(folders[1], tree, steps=steps)
        assert bool(plan.disk_activations) == bool(plan.spilled_layers) == (tree is spilling)
    assert losses(folders[1] / "run") == losses(folders[0] / "run")
