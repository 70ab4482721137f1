"""Several GPU workers on one host have the losses of one, through the CLI and real Ray.

Saves go from any number to any other, and one worker may die.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kill_campaign.cases import BACKWARD, GPU
from benchmarks.kill_campaign.phases import Phase
from tests.support.fault_injection import END_S, SECOND_SAVE, kill, training
from tests.support.gpu_runs import CLOSE, CLOSE_WITH_MUON, NO_DROPOUT, ROUTED, held_out, settings, trained, worst
from tests.support.in_process import Train
from tests.support.routers import HUNYUAN
from tests.support.runs import assert_same_masters, losses, plan_of, rows, write_config
from tests.support.tiny import TEXT


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("num_gpus", "changes"),
    [
        (2, {"eval_every": 5}),
        (3, {"hardware__hbm_layers": 2, "hardware__num_shards": 2}),
        (2, {"model__config": ROUTED}),
    ],
    ids=["two, with held-out data", "three with parts of two sizes, layers on the device", "two, with a router's loss"],
)
def test_several_gpus_compute_what_one_does(
    tmp_path: Path, train: Train, num_gpus: int, changes: dict[str, Any]
) -> None:
    if "eval_every" in changes:  # five windows of 32: fewer than an update has, and more than one GPU's share of it
        (tmp_path / "held_out.txt").write_text(TEXT.read_text()[:170])
        changes = {**changes, "data__eval_path": str(tmp_path / "held_out.txt")}
    one = trained(train, tmp_path / "one", 1, **changes)
    several = trained(train, tmp_path / "several", num_gpus, **changes)
    plan = plan_of(several)
    assert (plan.hosts.num_gpus, plan.batch_size, plan.step.num_micro_batches) == (num_gpus, 12, 6 // num_gpus)
    assert losses(several)[0] == losses(one)[0], "dropout is that of the micro-batch, whoever computes it"
    assert worst(several, one) < CLOSE
    assert worst(several, one, "grad_norm") < CLOSE
    assert [(row["tokens"], row["lr"]) for row in rows(several)] == [(row["tokens"], row["lr"]) for row in rows(one)]
    assert_same_masters(several, one, rtol=1e-4, atol=1e-5)
    assert held_out(several) == pytest.approx(held_out(one), rel=CLOSE)
    assert len(held_out(several)) == (3 if "eval_every" in changes else 0)


@pytest.mark.spread(1)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_clipping_two_gpus_with_a_micro_batch_each_are_one_with_two(
    tmp_path: Path, train: Train, optimizer: str
) -> None:
    """Two numbers have one sum, whoever takes it, and nothing depends on norms. Tokens have weights in the loss.

    With AdamW routers are FP32 beside bf16, on two hosts if they are threads. Who has a matrix orthogonalises the same.
    """
    ids = [list(TEXT.read_bytes()[33 * k : 33 * k + 33]) for k in range(120)]
    records = [{"input_ids": row, "weights": [(i + k) % 4 / 2 for i in range(33)]} for k, row in enumerate(ids)]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, records)))
    changes = {"train__clip": None, "train__precision": "bf16", "train__grad_dtype": "bf16"}
    changes |= {"train__optimizer": optimizer, "data__kind": "tokens", "data__path": str(tmp_path / "ids.jsonl")}
    changes |= {"model__config": {**HUNYUAN, "vocab_size": 257}} if optimizer == "adamw" else {}
    hosts = {"hardware__num_hosts": 2} if optimizer == "adamw" and not train.has_processes else {}
    run_dir = trained(train, tmp_path / "run", 2, train__micro_batch_size=6, train__accumulate=1, **changes | hosts)
    one = trained(train, tmp_path / "one", 1, train__micro_batch_size=6, train__accumulate=2, **changes)
    assert losses(run_dir) == losses(one)
    assert {row["tokens"] for row in rows(one)} <= set(range(12 * 23, 12 * 25)), "a quarter of 32 is not learned"
    assert plan_of(run_dir).gradients.accumulate_dtype is torch.float32, "the sum over GPUs is one over micro-batches"


@pytest.mark.long
def test_a_layer_uploaded_in_parts_is_the_same_layer(tmp_path: Path, train: Train) -> None:
    """Some of it frozen, some layers on the devices, and parts of two sizes."""
    changes = {"train__freeze": [r"layers\.1\.mlp"], "hardware__hbm_layers": 1, "train__steps": 3}
    whole = trained(train, tmp_path / "whole", 3, hardware__all_gather=False, **changes)
    run_dir = trained(train, tmp_path / "run", 3, hardware__all_gather=True, **changes)
    assert [plan_of(path).slots.gathered for path in (whole, run_dir)] == [False, True]
    assert losses(run_dir) == losses(whole)
    assert worst(run_dir, whole, "grad_norm") == 0.0


@pytest.mark.spread(1)
@pytest.mark.parametrize(("optimizer", "close"), [("adamw", CLOSE), ("muon", CLOSE_WITH_MUON)])
def test_a_save_goes_on_with_another_number_of_gpus(tmp_path: Path, train: Train, optimizer: str, close: float) -> None:
    """A run goes from two GPUs to one to three, with a split given for each, or with one that the plan chooses anew."""
    constant = {"train__schedule": "constant", "model__config": NO_DROPOUT, "train__optimizer": optimizer}
    whole = trained(train, tmp_path / "whole", 1, train__steps=9, **constant)
    run_dir = tmp_path / "run"
    for num_gpus, steps in ((2, 3), (1, 6), (3, 9)):
        free = {"train__micro_batch_size": None, "train__accumulate": None} if num_gpus == 1 else {}
        tree = settings(run_dir, num_gpus, train__steps=steps, **constant | free)
        done = train(str(write_config(tmp_path / "config.yaml", tree)))
        assert done.returncode == 0, done.stderr
        assert plan_of(run_dir).hosts.num_gpus == num_gpus
    assert worst(run_dir, whole) < close


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "hbm_layers", "phase", "expected"),
    [
        ("adamw", 0, BACKWARD, "GPU worker died and was replaced in "),
        ("muon", 0, BACKWARD, "GPU worker died and was replaced in "),
        ("adamw", 2, SECOND_SAVE, "; going on from the save of step "),
    ],
    ids=["repeated", "repeated, with Muon", "from the save"],
)
def test_one_of_two_gpu_workers_dies(
    tmp_path: Path, optimizer: str, hbm_layers: int, phase: Phase, expected: str
) -> None:
    """The run has the bits of an undisturbed one.

    All GPU workers are replaced; if something lives on the devices, they start again from the last save.
    """
    changes = {"train__steps": 20, "save_every": 2, "hardware__hbm_layers": hbm_layers, "train__optimizer": optimizer}
    tree = settings(tmp_path / "run", 2, **changes)
    with training(tmp_path, write_config(tmp_path / "config.yaml", tree)) as run:
        kill(run, phase, GPU)
        assert run.process.wait(END_S) == 0, run.text()
        assert expected in run.text()
        assert run.processes.await_end(5.0) == []
    undisturbed = settings(tmp_path / "undisturbed", 2, **changes)
    with training(tmp_path, write_config(tmp_path / "config.yaml", undisturbed)) as run:
        assert run.process.wait(END_S) == 0, run.text()
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
