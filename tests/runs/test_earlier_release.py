"""What commit 547e489 wrote is read, goes on, and is left where it is: its saves carry no mark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.commands import evaluate
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.io.saves.save_folder import list_saves, load_manifest, save_folder, verify
from megatrain_ray.run.run_files import RunFiles
from tests.support.in_process import Train
from tests.support.runs import ROOT, cli_here, losses

RUN = ROOT / "tests" / "data" / "run_of_547e489"
LATER_LOSSES = [5.512815952301025, 5.497528314590454]  # of steps 5 and 6, as that commit makes them


def test_its_files_are_read() -> None:
    files = RunFiles(RUN)
    plan, manifest = files.read_plan(), load_manifest(files.saves, 4)
    assert plan is not None
    assert [layer.name for layer in plan.layers] == [layer.name for layer in manifest.layers]
    assert (manifest.step, manifest.run, files.read_token()) == (4, None, None)
    assert [problem for step in (2, 4) for problem in verify(save_folder(files.saves, step))] == []
    assert len(files.rows()) == 4


def test_its_texts_begin_as_they_did_where_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bos token, which a run that begins now puts before each text if Transformers does."""
    seen: list[TrainConfig] = []

    def evaluated(source: str, config: TrainConfig, step: int | None) -> dict[str, Any]:
        seen.append(config)
        return {}

    monkeypatch.setattr(evaluate, "evaluate_model", evaluated)
    cli_here("eval", str(RUN), "--json", "data.eval_path=tests/data/text.txt")
    assert [config.data.add_bos for config in seen] == [False]


def test_its_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Train) -> None:
    monkeypatch.chdir(ROOT)
    run = shutil.copytree(RUN, tmp_path / "run")
    done = train(str(run / "config.yaml"), f"run_dir={run}", "train.steps=6", "save_every=1")
    assert done.returncode == 0, done.stderr
    assert losses(run)[4:] == pytest.approx(LATER_LOSSES, rel=1e-6)
    assert list_saves(run / "saves") == [2, 4, 5, 6], "those without a mark are never deleted"
    for step in (2, 4):
        assert f"{run}/saves/step_{step} is not deleted: it has no mark (owner.json)" in done.stderr
    assert load_manifest(run / "saves", 6).run == RunFiles(run).read_token() is not None
    exported = cli_here("export", str(run), str(tmp_path / "exported"))
    assert exported.returncode == 0, exported.stderr
