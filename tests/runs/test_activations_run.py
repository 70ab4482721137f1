"""Runs whose activations are on disk, and what else can be: through the CLI, equal to plain PyTorch, killed."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_campaign.cases import GPU
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.workers.arenas import activations_file
from tests.support.fault_injection import END_S, SECOND_SAVE, kill, training
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, config, plan_of, rows, write_config
from tests.support.spilling import assert_traffic_is_as_planned, least_ram, long_model, spill_file_of

LEAST_RAM: dict[str, int] = {}  # by what it is of: it takes a while to find


def on_disk(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings with so little host memory that all is on disk that may be, activations included."""
    spill = {"spill__path": str(folder / "spill"), "spill__compression": "none"}
    settings = {"data__seq_len": 512, "train__steps": 4, **spill, **changes}
    tree = config(folder / "run", long_model(folder), **settings)
    key = json.dumps({**changes, "train__steps": 0})
    if key not in LEAST_RAM:
        LEAST_RAM[key] = least_ram(folder, tree)
    return {**tree, "hardware": {**tree["hardware"], "ram_limit": LEAST_RAM[key]}}


ONE = {"train__micro_batch_size": 4, "train__accumulate": 1}
SEVERAL = {"train__precision": "bf16", "train__micro_batch_size": 2, "train__accumulate": 2, "save_every": 2}


@pytest.mark.spread(1)
@pytest.mark.parametrize("changes", [ONE, SEVERAL], ids=["fp32", "bf16, several micro-batches"])
def test_a_run_with_activations_on_disk_equals_plain_pytorch(
    tmp_path: Path, train: Train, changes: dict[str, Any]
) -> None:
    tree = on_disk(tmp_path, **changes)
    done = train(str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    plan = plan_of(tmp_path / "run")
    assert [layer.boundary for layer in plan.layers] == [Tier.HBM, *[Tier.NVME] * 8, Tier.HBM]
    assert plan.spilled_layers and plan.gradients_on_disk, "the shards are at the same disk"
    assert not list((tmp_path / "spill").iterdir())
    assert rows(tmp_path / "run")[0]["host_bytes"] <= plan.total_bytes(Tier.HOST)
    assert_traffic_is_as_planned(tmp_path / "run", plan)
    assert re.search(r"\n  disk +\S+ \S+ read and written a step, \S+ \S+ planned, ", done.stdout)
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


@pytest.mark.ray
@pytest.mark.long
def test_a_gpu_worker_that_dies_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    """State lives on the device, too, so all processes start again from the last save, with files of their own."""
    tree = on_disk(tmp_path, train__steps=12, **SEVERAL)
    with training(tmp_path, write_config(tmp_path / "config.yaml", tree)) as run:
        kill(run, SECOND_SAVE, GPU)
        assert run.process.wait(END_S) == 0, run.text()
        assert "; going on from the save of step " in run.text()
        assert run.processes.await_end(5.0) == []
    assert not list((tmp_path / "spill").iterdir())
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


@pytest.mark.ray
@pytest.mark.long
def test_damage_on_the_disk_ends_the_run_with_what_happened(tmp_path: Path) -> None:
    """Whenever it happens between a forward and its backward."""
    path = write_config(tmp_path / "config.yaml", on_disk(tmp_path, train__steps=100_000, **ONE))
    with training(tmp_path, path) as run:
        deadline_s = time.monotonic() + END_S
        while not rows(tmp_path / "run"):
            assert time.monotonic() < deadline_s, run.text()
            time.sleep(0.1)
        with spill_file_of(tmp_path / "spill", activations_file(0)).open("r+b", buffering=0) as damaged:
            size = os.fstat(damaged.fileno()).st_size
            while run.process.poll() is None:
                assert time.monotonic() < deadline_s, run.text()
                os.pwrite(damaged.fileno(), b"\xff" * size, 0)
        assert run.process.wait(END_S) == 1, run.text()
        assert run.text().count("are not what was written there") == 1
        assert "Traceback" not in run.text()


def test_too_little_disk_is_told_with_the_arithmetic(tmp_path: Path, train: Train) -> None:
    """A run within the limit would be chosen if something else fitted; here nothing does."""
    tree = on_disk(tmp_path, **ONE)
    done = train(str(write_config(tmp_path / "config.yaml", tree)), "spill.limit=64KiB")
    assert done.returncode == 3
    assert "of disk, 64.00 KiB available: raise spill.limit" in done.stderr
    assert not (tmp_path / "run" / "plan.json").exists()
