"""Runs whose working copies are partly on disk: through the CLI, equal to plain PyTorch, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.engine.layout.tier import Tier
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, config, plan_of, rows, write_config
from tests.support.spilling import NUM_LAYERS, small_model, with_all_on_disk


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
