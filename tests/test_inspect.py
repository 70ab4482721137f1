"""`megatrain inspect` of a run with saves, of one without, and of one whose newest save is damaged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatrain_ray.cli import main
from megatrain_ray.io.manifest import LayerEntry, Manifest, ParameterEntry
from megatrain_ray.io.save import Piece, commit_save, prepare_save, write_part
from megatrain_ray.run_dir import RunDir
from tests.settings import config


def save(saves: Path, step: int) -> None:
    """One layer of 1024 elements of 4 bytes."""
    folder = prepare_save(saves, step)
    piece = Piece("embed", "m", 0, 1024, [memoryview(bytes([step]) * 4096)])
    manifest = Manifest(
        version=1,
        step=step,
        optimizer_step=step,
        num_skipped=0,
        precision="fp32",
        itemsize={"m": 4},
        layers=(LayerEntry("embed", 1024, (ParameterEntry("embed.weight", (1024,), 0),)),),
        data={},
        model={},
        config={},
        parts=(asyncio.run(write_part(folder, 0, [piece])),),
    )
    commit_save(saves, step, manifest)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three updates, the second skipped."""
    with RunDir.open(config(run_dir=str(tmp_path / "run"))) as opened:
        opened.begin("{}", 0)
        for step, loss in enumerate((2.5, float("nan"), 2.25), start=1):
            row = {"step": step, "loss": loss, "grad_norm": loss, "lr": 1e-4, "tokens_per_s": 12345.0}
            opened.append(row | {"skipped": step == 2})
    return tmp_path / "run"


def test_a_run_without_saves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("saves") :] == [
        "saves",
        "  none",
        "last rows",
        "  step 1        loss 2.5000  grad_norm 2.5000  lr 0.0001  12.3k tokens/s",
        "  step 2        loss not finite  grad_norm not finite  lr 0.0001  12.3k tokens/s  skipped",
        "  step 3        loss 2.2500  grad_norm 2.2500  lr 0.0001  12.3k tokens/s",
        "checksums",
        "  nothing to check",
    ]
    assert "    steps: 4" in lines


def test_saves_with_their_size_and_a_verdict_on_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 10):
        save(run / "saves", step)
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.index("  step 9 ") < out.index("  step 10 ")
    assert " KiB" in out
    assert out.endswith("checksums\n  step 10: good\n")


def test_a_damaged_save_is_named_and_exits_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run / "saves", 3)
    blob = next(p for p in (run / "saves" / "step_3").rglob("*") if p.is_file() and p.name != "manifest.json")
    blob.write_bytes(b"\1" + blob.read_bytes()[1:])
    assert main(["inspect", str(run)]) == 1
    verdict = capsys.readouterr().out.split("checksums\n")[1].splitlines()
    assert verdict[0] == "  step 3: DAMAGED"
    assert blob.name in verdict[1]
