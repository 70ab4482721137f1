"""Runs whose working copies are partly on disk: through the CLI, equal to plain PyTorch, resumed, killed, damaged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_campaign.cases import BACKWARD, SHARD_0, SHARD_1
from megatrain_ray.engine.layout.tier import Tier
from tests.support.fault_injection import END_S, kill, mid_update, training
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, config, plan_of, rows, write_config
from tests.support.spilling import ROUNDED, small_model, spill_file_of, with_all_on_disk

NUM_LAYERS = 8  # of five or fewer, windows and slots would take as much as the working copies


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"save_every": 3},
        {"train__precision": "bf16", "train__clip": None, "hardware__num_shards": 2},
    ],
    ids=["fp32", "two shards, no clipping"],
)
def test_a_run_with_weights_on_disk_equals_plain_pytorch(tmp_path: Path, train: Train, changes: dict[str, Any]) -> None:
    model = small_model(tmp_path, num_layers=NUM_LAYERS)
    tree = with_all_on_disk(tmp_path, config(tmp_path / "run", model, **changes))
    done = train(str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    plan = plan_of(tmp_path / "run")
    assert len(plan.weights_on_disk) > plan.disk.num_upload_buffers
    assert not list((tmp_path / "spill").iterdir())
    assert rows(tmp_path / "run")[0]["host_bytes"] <= plan.total_bytes(Tier.HOST)
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


@pytest.mark.long
def test_a_save_goes_on_where_weights_live_elsewhere(tmp_path: Path, train: Train) -> None:
    """A run goes on from disk to memory and back, with a start each; evaluations read the weights, too."""
    model = small_model(tmp_path, num_layers=NUM_LAYERS)
    common = config(tmp_path / "run", model, train__schedule="constant", train__steps=6)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("Now is the winter of our discontent\n" * 20)
    common = {**common, "eval_every": 2, "data": {**common["data"], "eval_path": str(held_out)}}
    on_disk = with_all_on_disk(tmp_path, common)
    for tree, steps in ((on_disk, 2), (common, 4), (on_disk, 6)):
        path = write_config(tmp_path / "config.yaml", {**tree, "train": {**tree["train"], "steps": steps}})
        done = train(str(path))
        assert done.returncode == 0, done.stderr
        assert bool(plan_of(tmp_path / "run").weights_on_disk) == (tree is on_disk)
    assert_equals_reference(tmp_path / "run", common, tmp_path / "out")


@pytest.mark.ray
@pytest.mark.long
def test_a_shard_that_dies_while_its_weights_are_on_disk_is_replaced(tmp_path: Path) -> None:
    """A shard dies in an update of layers whose working copies the GPU worker then reads from the file.

    Another one dies in a backward that reads them.
    """
    model = small_model(tmp_path, hidden_size=384, num_layers=NUM_LAYERS)
    settings = {"hardware__num_shards": 2, "train__steps": 12, "max_failures": 4}
    tree = with_all_on_disk(tmp_path, config(tmp_path / "run", model, save_every=6, **settings, **ROUNDED))
    path = write_config(tmp_path / "config.yaml", tree)
    with training(tmp_path, path) as run:
        kill(run, mid_update(0), SHARD_0)
        kill(run, BACKWARD, SHARD_1)
        assert run.process.wait(END_S) == 0, run.text()
        for shard in range(2):
            assert run.text().count(f"optimizer shard {shard} died and was replaced") == 1
    assert plan_of(tmp_path / "run").weights_on_disk
    assert not list((tmp_path / "spill").iterdir())
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


@pytest.mark.ray
@pytest.mark.long
def test_damaged_weights_end_the_run_with_what_happened(tmp_path: Path) -> None:
    model = small_model(tmp_path, num_layers=NUM_LAYERS)
    tree = with_all_on_disk(tmp_path, config(tmp_path / "run", model, train__steps=100_000, save_every=3))
    path = write_config(tmp_path / "config.yaml", tree)
    with training(tmp_path, path) as run:
        deadline_s = time.monotonic() + END_S
        while not run.saves().committed:
            assert time.monotonic() < deadline_s, run.text()
            time.sleep(0.1)
        file = spill_file_of(tmp_path / "spill")
        with file.open("r+b") as damaged:
            damaged.write(b"\xff" * file.stat().st_size)
        assert run.process.wait(END_S) == 1, run.text()
        assert run.text().count("are not what was written there") == 1
        assert "Traceback" not in run.text()
