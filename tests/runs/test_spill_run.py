"""Runs whose optimizer state is partly on disk: through the CLI, equal to plain PyTorch, resumed and killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_campaign.cases import BACKWARD, SHARD_0, SHARD_1
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.report.measured_starts import compare_starts
from megatrain_ray.run.run_files import RunFiles
from tests.support.fault_injection import END_S, kill, mid_update, training
from tests.support.in_process import Train
from tests.support.runs import (
    assert_equals_reference,
    config,
    plan_of,
    rows,
    write_config,
)
from tests.support.spilling import (
    NUM_LAYERS,
    ROUNDED,
    small_model,
    spill_file_of,
    spilling,
    with_all_on_disk,
    with_gradients_on_disk,
)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"save_every": 3, "spill__compression": "zstd", **ROUNDED},
        {"save_every": 3},
        {"train__precision": "bf16", "train__clip": None, "hardware__num_shards": 2},
    ],
    ids=["gradients, too, packed", "fp32", "two shards, no clipping"],
)
def test_a_run_that_spills_equals_plain_pytorch(
    tmp_path: Path, train: Train, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What packs takes more than all of this model's state: a plan that counted it would not spill.
    monkeypatch.setattr(Packer, "num_bytes", lambda max_bytes: 0)
    tree = config(tmp_path / "run", small_model(tmp_path), **changes)
    has_gradients = changes.items() >= ROUNDED.items()
    tree = with_gradients_on_disk(tmp_path, tree) if has_gradients else spilling(tmp_path, tree)
    done = train(str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    plan = plan_of(tmp_path / "run")
    assert len(plan.spilled_layers) > plan.disk.num_state_slots == 3
    assert plan.total_bytes(Tier.NVME) > 0
    assert bool(plan.gradients_on_disk) == plan.disk.packed == has_gradients
    assert not list((tmp_path / "spill").iterdir())
    assert rows(tmp_path / "run")[0]["host_bytes"] <= plan.total_bytes(Tier.HOST)
    (found,) = compare_starts(RunFiles(tmp_path / "run"))
    moved, on_disk = (found.term(name) for name in ("disk traffic", "on disk"))
    assert moved and on_disk and 0 < on_disk.measured <= on_disk.predicted
    assert 0.5 < moved.measured / moved.predicted < 2  # what saves read comes on top
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


def test_a_save_goes_on_where_state_lives_elsewhere(tmp_path: Path, train: Train) -> None:
    """A run goes on from disk to memory and back, with a start each."""
    common = config(tmp_path / "run", small_model(tmp_path), train__precision="bf16", train__schedule="constant")
    on_disk = spilling(tmp_path, common)
    for tree, steps in ((on_disk, 4), (common, 7), (on_disk, 10)):
        path = write_config(tmp_path / "config.yaml", {**tree, "train": {**tree["train"], "steps": steps}})
        done = train(str(path))
        assert done.returncode == 0, done.stderr
        assert bool(plan_of(tmp_path / "run").spilled_layers) == (tree is on_disk)
    assert_equals_reference(tmp_path / "run", common, tmp_path / "out")


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("with_weights", [False, True], ids=["state and gradients", "weights, too"])
def test_a_shard_that_dies_while_its_state_is_on_disk_is_replaced(tmp_path: Path, with_weights: bool) -> None:
    """What its slots hold is ahead of the file; the next process writes it.

    One dies in an update of layers whose working copies the GPU worker then reads from the file. Another one dies while
    gradients come, in a backward that reads working copies.
    """
    model = small_model(tmp_path, hidden_size=384, **({"num_layers": NUM_LAYERS} if with_weights else {}))
    settings = {"hardware__num_shards": 2, "train__steps": 20, "max_failures": 4}
    place = with_all_on_disk if with_weights else with_gradients_on_disk
    tree = place(tmp_path, config(tmp_path / "run", model, save_every=10, **settings, **ROUNDED))
    path = write_config(tmp_path / "config.yaml", tree)
    with training(tmp_path, path) as run:
        kill(run, mid_update(0), SHARD_0)
        kill(run, BACKWARD, SHARD_1)
        assert run.process.wait(END_S) == 0, run.text()
        for shard in range(2):
            assert run.text().count(f"optimizer shard {shard} died and was replaced") == 1
    plan = plan_of(tmp_path / "run")
    assert plan.spilled_layers
    assert plan.weights_on_disk if with_weights else plan.gradients_on_disk
    assert not list((tmp_path / "spill").iterdir())
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


def test_too_little_disk_is_told_with_the_arithmetic(tmp_path: Path, train: Train) -> None:
    tree = spilling(tmp_path, config(tmp_path / "run", small_model(tmp_path)))
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path), "spill.limit=8KiB")
    assert done.returncode == 3
    assert "of disk" in done.stderr and "raise spill.limit" in done.stderr
    assert not (tmp_path / "run" / "plan.json").exists()
    without = {key: value for key, value in tree.items() if key != "spill"}
    done = train(str(write_config(tmp_path / "config.yaml", without)))
    assert done.returncode == 3
    assert "of room as spill.path" in done.stderr


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("with_weights", [False, True], ids=["state", "weights, too"])
def test_damage_on_the_disk_ends_the_run_with_what_happened(tmp_path: Path, with_weights: bool) -> None:
    """Never with wrong numbers, and not only with what follows from it."""
    model = small_model(tmp_path, **({"num_layers": NUM_LAYERS} if with_weights else {}))
    place = with_all_on_disk if with_weights else spilling
    tree = place(tmp_path, config(tmp_path / "run", model, train__steps=100_000, save_every=3))
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
