"""LoRA as a user meets it: through the command line and from Python, saves without the base, a resume, both exports."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.kill_campaign.cases import BACKWARD, DRIVER, SHARD_0
from benchmarks.kill_campaign.phases import by_saves
from megatrain_ray import Trainer
from megatrain_ray.cli import main
from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export import export_run
from megatrain_ray.io.saves.manifest import read_manifest
from megatrain_ray.run.run_files import RunFiles
from tests.data.test_objects import RECORDS, settings
from tests.support.adapters import build_adapter, peft
from tests.support.fault_injection import END_S, kill, prepare, training
from tests.support.in_process import Actors, Train
from tests.support.runs import cli_here, config, losses, reference_of, rows, write_config
from tests.support.tiny import build_tiny

IDS = torch.arange(40).view(2, 20)
PREFIX = "base_model.model."
SAVED = by_saves("a save stands", lambda saves: bool(saves.committed))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def adapted(model: Path, adapter: Path) -> Any:
    """Load model and adapter by peft, which warns, and so fails a test, where a tensor is missing."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter)


def change_one_weight(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def test_train_save_resume_and_export(tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A run goes on from an adapter of peft's, with norms trained beside it; another number of shards resumes it.

    Another base is refused. What is exported is what plain PyTorch has trained.
    """
    model, run_dir = build_tiny(tmp_path / "model"), tmp_path / "run"
    adapter = build_adapter(tmp_path / "adapter", model, ["q_proj", "down_proj"])
    tree = config(
        run_dir,
        model,
        train__steps=3,
        train__schedule="constant",
        train__trainable=["norm"],
        lora={"match": [r"\.(q|down)_proj$"], "rank": 4, "alpha": 8, "path": str(adapter)},
        hardware__num_shards=2,
    )
    first = train(str(write_config(tmp_path / "first.yaml", tree)))
    assert first.returncode == 0, first.stderr
    manifest = read_manifest(run_dir / "saves" / "step_3")
    saved = {(blob.kind, piece.layer) for blob in manifest.blobs() for piece in blob.pieces}
    assert {layer for _, layer in saved} == {"layers.0", "layers.1", "layers.2", "head"}
    assert all((layer.base_crc32 is None) is (layer.num_frozen == 0) for layer in manifest.layers)

    tree["train"]["steps"], tree["hardware"]["num_shards"] = 5, 3
    tree["eval_every"], tree["data"]["eval_path"] = 5, str(tmp_path / "held.txt")
    (tmp_path / "held.txt").write_text("held out " * 50)
    second = str(write_config(tmp_path / "second.yaml", tree))
    kept = (model / "model.safetensors").read_bytes()
    change_one_weight(model)
    refused = train(second)
    assert refused.returncode == 2
    assert "base model has changed: the frozen weights of layers.1 (and 0 more layers)" in refused.stderr
    (model / "model.safetensors").write_bytes(kept)
    moved = adapter.rename(tmp_path / "moved")  # which a resume does not ask for
    assert train(second).returncode == 0
    assert "lora.alpha: 8.0 -> 16.0" in train(second, "lora.alpha=16").stderr

    moved.rename(adapter)
    theirs = reference_of(run_dir, tree)
    assert losses(run_dir) == theirs.losses
    assert [row["grad_norm"] for row in rows(run_dir)] == theirs.grad_norms
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    stored = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.removeprefix(PREFIX) for name in stored} == theirs.masters.keys()
    assert all(torch.equal(stored[PREFIX + name], master) for name, master in theirs.masters.items())

    assert main(["export", str(run_dir), str(tmp_path / "merged"), "--merge"]) == 0
    merged, alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), adapted(model, tmp_path / "out")
    assert not (logits(alone) == logits(adapted(model, adapter))).all()
    torch.testing.assert_close(logits(merged), logits(alone), rtol=1e-5, atol=1e-5)
    with train.actors():
        evaluated = cli_here("eval", str(run_dir), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    [row] = RunFiles(run_dir).evaluations()
    assert (
        json.loads(evaluated.stdout).items() >= {key: row[key] for key in ("step", "eval_loss", "eval_tokens")}.items()
    )
    capsys.readouterr()
    assert main(["inspect", str(run_dir), "--verify"]) == 0
    assert "step 5: good" in capsys.readouterr().out


@pytest.mark.long
def test_killed_and_resumed(tmp_path: Path, ray_address: str) -> None:
    """A shard is replaced, which keeps the base; then everything dies, and a new crew loads it again."""
    tree, path = prepare(tmp_path, train__steps=12, save_every=2)
    adapter = build_adapter(tmp_path / "adapter", tmp_path / "model", ["up_proj", "o_proj"])
    tree["lora"] = {"match": [r"\.(up|o)_proj$"], "rank": 4, "alpha": 8, "path": str(adapter)}
    write_config(path, tree)
    with training(tmp_path, path) as run:
        kill(run, BACKWARD, SHARD_0)
        kill(run, SAVED, DRIVER)
        assert run.process.wait(END_S) == -signal.SIGKILL
        assert "optimizer shard 0 died and was replaced" in run.text()
    done = cli_here("train", str(path))
    assert done.returncode == 0, done.stderr
    assert "resuming from the save of step" in done.stderr
    theirs = reference_of(tmp_path / "run", tree)
    assert losses(tmp_path / "run") == theirs.losses
    assert [row["grad_norm"] for row in rows(tmp_path / "run")] == theirs.grad_norms


def test_from_python_with_a_model_object(tmp_path: Path, actors: Actors) -> None:
    """bf16: what is merged is rounded once, from FP32 masters and the base as it streamed."""
    folder = build_tiny(tmp_path / "model")
    tree = settings(
        tmp_path / "run", train__steps=2, train__precision="bf16", train__lr=0.1, lora={"match": "v_proj", "rank": 2}
    )
    with actors():
        trainer = Trainer(LlamaForCausalLM.from_pretrained(folder), tree, train_dataset=RECORDS)
        trainer.train()
    stored = safetensors.torch.load_file(trainer.save_model(tmp_path / "fp32", "fp32") / "adapter_model.safetensors")
    working = safetensors.torch.load_file(trainer.save_model(tmp_path / "bf16") / "adapter_model.safetensors")
    assert {values.dtype for values in working.values()} == {torch.bfloat16}
    base, model = LlamaForCausalLM.from_pretrained(folder), trainer.load_model("fp32")
    assert type(model) is LlamaForCausalLM
    for name, values in model.state_dict().items():
        expected = to_working(base.state_dict()[name]).float()
        if "v_proj" in name:
            a, b = (stored[PREFIX + name.replace("weight", f"lora_{which}.weight")] for which in "AB")
            expected = expected + b @ a * 16.0
            assert not torch.allclose(expected, base.state_dict()[name], atol=0.01)
        assert torch.equal(values, expected), name
    assert torch.equal(trainer.load_model().lm_head.weight, to_working(base.lm_head.weight.detach()))


def test_a_merge_of_what_has_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run" / "config.yaml", config(tmp_path / "run", tmp_path))
    with pytest.raises(ConfigError, match=r"--merge: .*/run trained the model itself and has no adapters"):
        export_run(tmp_path / "run", tmp_path / "out", None, merge=True)
