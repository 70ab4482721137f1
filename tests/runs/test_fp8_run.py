"""train.compute: fp8 as a user meets it: said wherever a run is described, the same bits on a resume, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.cli import main
from megatrain_ray.engine.layout.precision import FP8_COMPUTE
from megatrain_ray.model import discover_model
from tests.support.in_process import Train
from tests.support.reference import train_reference
from tests.support.runs import config, exported_masters, losses, recipe_of, write_config
from tests.support.tiny import build_tiny, text_batches

FP8 = "train.compute=fp8"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a configuration in bf16."""
    folder = tmp_path_factory.mktemp("fp8")
    model = build_tiny(folder / "model", num_layers=2)
    return str(write_config(folder / "config.yaml", config(folder / "run", model, train__precision="bf16")))


def test_train_resume_and_export(tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    model, run_dir = build_tiny(tmp_path / "model", num_layers=2), tmp_path / "run"
    tree = config(run_dir, model, train__precision="bf16", train__compute="fp8", train__steps=4)
    path = str(write_config(tmp_path / "config.yaml", tree))
    for steps in (2, 4):
        done = train(path, f"train.steps={steps}", "train.schedule=constant")
        assert done.returncode == 0, done.stderr
        assert f"compute   {FP8_COMPUTE}; emulated on a CPU, for tests" in done.stderr
        assert "bf16, products of layers in fp8" in done.stderr
        assert f"compute   {FP8_COMPUTE}" in done.stdout
    tree["train"]["schedule"] = "constant"
    theirs = train_reference(model, text_batches(4, 4, 32), recipe_of(run_dir, tree))
    assert losses(run_dir) == theirs.losses
    for name, master in exported_masters(run_dir, tmp_path / "fp32").items():
        assert torch.equal(master, theirs.masters[name].flatten()), name
    capsys.readouterr()
    assert main(["inspect", str(run_dir)]) == 0
    assert "bf16, products of layers in fp8" in capsys.readouterr().out
    refused = train(path, "train.steps=5", "train.schedule=constant", "train.compute=null")
    assert refused.returncode == 2
    assert "train.compute" in refused.stderr


def test_a_plan_counts_it(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The card is not here; what is rounded takes memory."""
    assert main(["plan", path, FP8, "hardware.device=cuda", "hardware.profile=h100", "hardware.compile=false"]) == 0
    shown = capsys.readouterr().out
    assert f"compute   {FP8_COMPUTE}" in shown
    assert "KiB of FP8 copies" in shown


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.precision=fp8"], "expected 'bf16', 'fp32' or 'tf32', got 'fp8'; FP8 is train.compute: fp8"),
        (["train.precision=fp32"], "train.compute: fp8 goes with train.precision: bf16, and that is fp32; set bf16"),
        (
            ["hardware.device=cuda", "hardware.profile=a100"],
            "hardware.profile names the A100 80 GB SXM, which has no FP8; name another",
        ),
        (
            ["hardware.device=cuda", "hardware.hbm_limit=20GiB"],
            "needs a GPU of compute capability 8.9 or more (H100, RTX 40 and later), and NVIDIA A10 has 8.6",
        ),
        ([], "has no such products on this CPU: no kernel; leave it out"),
    ],
)
def test_what_cannot_be(
    path: str, settings: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover_model, "compute_capability", lambda: (8, 6))
    monkeypatch.setattr(discover_model, "device_name", lambda: "NVIDIA A10")
    monkeypatch.setattr(discover_model, "fp8_problem", lambda device: "no kernel")
    assert main(["plan", path, FP8, *settings]) == 2
    assert said in capsys.readouterr().err
