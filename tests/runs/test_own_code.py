"""A model with code of its own and buffers in its checkpoint: parity, and all of it in the export."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatrain_ray.io.checkpoints.safetensors_folder import SINGLE_NAME
from tests.support.family_models import family_batches
from tests.support.in_process import Train
from tests.support.own_code import build_own_code
from tests.support.reference import Recipe, load_model, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.runs import cli_here, config, write_config


def test_fp32_is_bit_equal(tmp_path: Path) -> None:
    folder = build_own_code(tmp_path / "own")
    batches, recipe = family_batches(10), Recipe(10, micro_batch_size=2)
    ours = train_engine(folder, batches, recipe, Mode(), trust_remote_code=True)
    theirs = train_reference(folder, batches, recipe)
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert [name for name, m in theirs.masters.items() if not torch.equal(ours.masters[name], m)] == []


def test_an_export_holds_code_and_buffers(tmp_path: Path, train: Train) -> None:
    folder, run, out = build_own_code(tmp_path / "own", vocab_size=257), tmp_path / "run", tmp_path / "out"
    settings = {"model__trust_remote_code": True, "train__steps": 1, "data__packing": False, "data__tokenizer": "bytes"}
    build = load_file(folder / SINGLE_NAME)
    trained = train(str(write_config(tmp_path / "config.yaml", config(run, folder, **settings))))
    assert trained.returncode == 0, trained.stderr
    (folder / "secret.py").symlink_to(tmp_path / "config.yaml")
    done = cli_here("export", str(run), str(out), "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"links that lead out of {folder} are not exported: secret.py; copy") == 1
    assert not (out / "secret.py").exists()
    exported = load_file(out / SINGLE_NAME)
    assert exported.keys() == build.keys()
    buffers = [name for name in build if name.endswith((".scale", ".order"))]
    assert len(buffers) == 6
    assert all(exported[name].dtype == build[name].dtype for name in buffers)
    assert all(torch.equal(exported[name], build[name]) for name in buffers)
    model = load_model(out, torch.float32)
    assert all(torch.equal(model.state_dict()[name], values) for name, values in exported.items())
