"""Whole runs through the command line and real actors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.run.run_history import read_history
from megatrain_ray.run.run_processes import wait_gone
from tests.metrics.test_metric_sinks import scalars
from tests.support.in_process import Train
from tests.support.reference import train_reference
from tests.support.runs import (
    ROOT,
    assert_equals_reference,
    cli_here,
    command,
    config,
    exported_masters,
    losses,
    plan_of,
    recipe_of,
    rows,
    write_config,
)
from tests.support.tiny import build_tiny, text_batches

Row = dict[str, Any]

# Of Python, of libraries and of a checkout of this one. Python imports types.py before it runs any program by -m.
MODULES = ("random", "queue", "socket", "tempfile", "numpy", "torch", "ray", "greenlet", "engine")

STEPS = 120  # of a run that is interrupted: more than are made before the signal is heard

PARITY_ROWS: dict[str, tuple[Row, bool, tuple[LoopOrder, ActivationPolicy, int, int]]] = {
    # name: (settings, tied with dropout, what the plan must say: order, activations, micro-batches, shards)
    "one-micro-batch": (
        {"train__batch_size": 4},  # the plan chooses
        False,
        (LoopOrder.MICRO_BATCHES_OUTER, ActivationPolicy.KEEP, 1, 1),
    ),
    "layers-outer": (
        {"hardware__num_shards": 3, "train__seed": 5},
        True,
        (LoopOrder.LAYERS_OUTER, ActivationPolicy.KEEP, 4, 3),
    ),
    "sums-on-the-device": (
        {"hardware__hbm_limit": 1_800_000, "train__precision": "bf16"},
        False,
        (LoopOrder.MICRO_BATCHES_OUTER, ActivationPolicy.KEEP, 4, 1),
    ),
    "layers-outer-without-clipping": (
        {"hardware__num_shards": 2, "hardware__hbm_limit": 1_300_000, "train__clip": None, "train__precision": "bf16"},
        False,
        (LoopOrder.LAYERS_OUTER, ActivationPolicy.KEEP, 4, 2),
    ),
    "recomputed": (
        {"hardware__num_shards": 2, "hardware__hbm_limit": 1_100_000, "train__clip": None, "train__precision": "bf16"},
        False,
        (LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, 4, 2),
    ),
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", PARITY_ROWS)
def test_parity_through_the_command_line(tmp_path: Path, train: Train, name: str) -> None:
    """Memory limits choose the mode, as a user would; the plan tells which it was."""
    settings, tied, expected = PARITY_ROWS[name]
    model = build_tiny(tmp_path / "model", tied=tied, attention_dropout=0.1 if tied else 0.0)
    tree = config(tmp_path / "run", model, **settings)
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    plan = plan_of(tmp_path / "run")
    assert (
        plan.step.order,
        plan.layers[1].activations,
        plan.step.num_micro_batches,
        plan.shards.num_shards,
    ) == expected
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


def leftovers(pid: int) -> list[str]:
    """Return what an embedded Ray of that driver left in /tmp."""
    return [p.name for p in Path("/tmp").iterdir() if p.name.startswith(f"megatrain-{pid}-")]


def arenas_mapped(pid: int) -> set[str]:
    """Return what the arenas hold that a process maps.

    Their names begin with megatrain- and the run's own eight digits.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split("/memfd:megatrain-")[1].split(" ")[0][9:] for line in lines if "/memfd:megatrain-" in line}


def folder_of_modules(folder: Path) -> Path:
    """Make a folder with files that are called like modules and end each program that imports one of them."""
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"import os, sys; print('imported {name}', file=sys.stderr); os._exit(9)")
    return folder


def interrupt(path: Path, run_dir: Path) -> str:
    """Train some steps with an embedded Ray, interrupt the run, and return what it wrote to standard error.

    It starts in a folder of files that nothing may import. The signal goes to the whole process group, as a terminal
    sends it. (`ray job stop` sends SIGTERM: test_ray_job.py.)
    """
    enough = 4
    folder = folder_of_modules(run_dir.with_name("modules"))
    process = subprocess.Popen(
        command("train", str(path)), cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(rows(run_dir)) < enough and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # for the run, not for the test: any step will do
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    mapped = {pid: arenas for pid in family if (arenas := arenas_mapped(pid))}
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    states = sorted(name for arenas in mapped.values() for name in arenas if name.startswith("state-"))
    assert states == ["state-0", "state-1"], "each shard maps its own state, and nobody else does"
    assert all(len([a for a in arenas if a.startswith("state-")]) <= 1 for arenas in mapped.values())
    for pid in family:
        wait_gone(pid, 0.0)  # a process that nobody has reaped yet is gone, too
    assert not leftovers(process.pid)
    assert enough <= len(rows(run_dir)) < STEPS
    return errors


def test_ctrl_c_while_the_driver_plans_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ray and the run's processes have begun by then."""
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    process = subprocess.Popen(
        command("train", str(path)), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr
    assert any("reading the model's configuration" in line for line in process.stderr)
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "interrupted: nothing more was saved; the same command starts again\n")
    assert len(family) > 4
    for pid in family:
        wait_gone(pid, 0.0)  # a process that nobody has reaped yet is gone, too
    assert not leftovers(process.pid)
    assert not (tmp_path / "run").exists()


def test_interrupt_save_resume_and_nothing_left_behind(tmp_path: Path, ray_address: str) -> None:
    """A new process goes on, on another cluster with other save settings and fewer steps; the reference in the end."""
    model = build_tiny(tmp_path / "model")
    tree = config(tmp_path / "run", model, train__steps=STEPS, train__schedule="constant", hardware__num_shards=2)
    path = write_config(tmp_path / "config.yaml", tree)
    assert "the same command resumes" in interrupt(path, tmp_path / "run")
    steps = len(rows(tmp_path / "run")) + 4
    tree = {**tree, "train": {**tree["train"], "steps": steps}}
    path = write_config(path, tree)
    done = cli_here("train", str(path), "save_every=100", "save_keep=1", "hardware.num_shards=3")
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "run")) == steps
    assert (tmp_path / "run" / "report.html").exists()
    assert [p.name for p in (tmp_path / "run" / "saves").iterdir()] == [f"step_{steps}"]
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    again = cli_here("train", str(path))
    assert again.returncode == 0
    assert f"already at step {steps}" in again.stdout


def test_ten_steps_are_four_and_six(tmp_path: Path, train: Train) -> None:
    """Resuming from the save after 4 updates, in mid-epoch, is bit for bit the whole run.

    TensorBoard shows the steps that were made twice once.
    """
    model = build_tiny(tmp_path / "model", attention_dropout=0.1)
    tree = config(tmp_path / "run", model, save_every=4, save_keep=5, train__precision="bf16")
    path = write_config(tmp_path / "config.yaml", tree)
    assert train(str(path)).returncode == 0
    whole = rows(tmp_path / "run")
    masters = exported_masters(tmp_path / "run", tmp_path / "whole")
    for step in (8, 10):
        shutil.rmtree(tmp_path / "run" / "saves" / f"step_{step}")
    done = train(str(path), "save_every=0")
    assert done.returncode == 0, done.stderr
    resumed = rows(tmp_path / "run")
    assert [row["step"] for row in resumed] == list(range(1, 11))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert (ours["loss"], ours["grad_norm"], ours["lr"]) == (theirs["loss"], theirs["grad_norm"], theirs["lr"])
    for name, master in exported_masters(tmp_path / "run", tmp_path / "resumed").items():
        assert torch.equal(master, masters[name]), name
    drawn = scalars(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in drawn["train/loss"]] == list(range(1, 11))
    assert [value for _, value in drawn["train/loss"]] == pytest.approx([row["loss"] for row in resumed])
    assert {"train/lr", "train/grad_norm", "speed/tokens_per_s", "speed/exposed_s/optimizer"} <= drawn.keys()


OTHER_RATES = {
    "lr": 2e-3, "min_lr": 1e-4, "schedule": "linear", "warmup_steps": 6, "weight_decay": 0.3, "clip": 0.5,
    "betas": [0.8, 0.99], "eps": 1e-6, "steps": 12, "groups": [{"match": "layernorm", "lr": 5e-3, "weight_decay": 0.2}],
}  # fmt: skip


def test_a_resume_with_other_rates_is_plain_pytorch_with_the_rates_changed_at_that_step(
    tmp_path: Path, train: Train
) -> None:
    model, run = build_tiny(tmp_path / "model"), tmp_path / "run"
    tree = config(run, model, train__steps=8, save_every=4, train__groups=[{"match": "layernorm", "lr": 1e-4}])
    path = write_config(tmp_path / "config.yaml", tree)
    assert train(str(path)).returncode == 0
    shutil.rmtree(run / "saves" / "step_8")
    begun = train_reference(model, text_batches(4, 4, 32), recipe_of(run, tree))
    changed = {**tree, "train": {**tree["train"], **OTHER_RATES}}
    done = train(str(write_config(path, changed)))
    assert done.returncode == 0, done.stderr
    assert "resumed with train.steps 8 -> 12, train.lr 0.001 -> 0.002, " in done.stderr
    assert "train.groups.0.weight_decay null -> 0.2" in done.stderr
    rates = {key: value for key, value in OTHER_RATES.items() if key not in ("groups", "clip", "schedule", "betas")}
    recipe = replace(recipe_of(run, changed), **rates, betas=(0.8, 0.99))
    theirs = train_reference(model, text_batches(12, 4, 32)[4:], recipe, start=begun)
    assert losses(run) == begun.losses + theirs.losses
    assert [row["lr"] for row in rows(run)] == begun.learning_rates + theirs.learning_rates
    for name, master in exported_masters(run, tmp_path / "out").items():
        assert torch.equal(master, theirs.masters[name].flatten()), name
    starts = [row for row in read_history(run) if row["what"] == "start"]
    assert [start["changed"].get("train.lr") for start in starts] == [None, [1e-3, 2e-3]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    """Return the folder of a whole run from random weights, and its configuration. Tests leave it as it is."""
    shape = {
        "model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("made")
    tree = config(folder / "run", shape, train__steps=2, train__precision="bf16")
    done = train(str(write_config(folder / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    return folder


def test_resume_refuses_other_settings(made: Path, train: Train) -> None:
    path = str(made / "config.yaml")
    before = sorted(p.relative_to(made) for p in (made / "run").rglob("*"))
    refused = train(path, "train.seed=2", "train.steps=3")
    assert refused.returncode == 2
    assert "train.seed: 0 -> 2" in refused.stderr
    assert "train.steps" not in refused.stderr
    assert train(path, "resume=false").returncode == 2
    assert sorted(p.relative_to(made) for p in (made / "run").rglob("*")) == before


def test_export_generates(made: Path, tmp_path: Path) -> None:
    """The exported folder is an ordinary Hugging Face model, with a tokenizer for its bytes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert losses(made / "run")[0] == pytest.approx(5.55, abs=0.3)
    assert cli_here("export", str(made / "run"), str(tmp_path / "hf")).returncode == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == ["LlamaForCausalLM"]
    ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
    assert ids.shape == (1, 8)
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("é")["input_ids"] == [0xC3, 0xA9]
    inspected = cli_here("inspect", str(made / "run"), "--verify")
    assert inspected.returncode == 0, inspected.stderr
    assert "step 2: good" in inspected.stdout


def test_python_api(tmp_path: Path, ray_address: str) -> None:
    """Trainer in a process that is connected to Ray already."""
    from megatrain_ray import Trainer

    model = build_tiny(tmp_path / "model")
    tree = config(tmp_path / "run", model, train__steps=3, save_every=None)
    output = Trainer(args=tree).train()
    assert output.global_step == 3
    assert [row["loss"] for row in output.rows] == losses(tmp_path / "run")
    assert not list((tmp_path / "run" / "saves").iterdir())
