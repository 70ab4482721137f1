"""What a user does to the saves and rows of a run, and what the next start makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatrain_ray.io.saves.save_folder import list_saves
from tests.support.in_process import Train
from tests.support.runs import cli_here, config, losses, write_config
from tests.support.tiny import build_tiny


def test_saves_moved_linked_or_copied_in_and_rows_that_were_deleted(tmp_path: Path, train: Train) -> None:
    model = build_tiny(tmp_path / "model")
    whole, run, other = tmp_path / "whole", tmp_path / "run", tmp_path / "other"
    changes = {"save_every": 1, "save_keep": 2}
    paths = {
        folder: str(write_config(tmp_path / f"{folder.name}.yaml", config(folder, model, data__seed=seed, **changes)))
        for folder, seed in ((whole, 0), (run, 0), (other, 5))
    }
    assert train(paths[whole], "train.schedule=constant", "train.steps=6").returncode == 0
    for folder in (run, other):
        assert train(paths[folder], "train.schedule=constant", "train.steps=4").returncode == 0
    again = (paths[run], "train.schedule=constant", "train.steps=6")

    copied = shutil.copytree(other / "saves" / "step_4", run / "saves" / "step_9")
    for done in (train(*again), cli_here("export", str(run), str(tmp_path / "exported"))):
        assert done.returncode == 2, done.stderr
        assert f"{run}/saves/step_9 is the save of step 4 of the run in {other}: move it away" in done.stderr
    assert list_saves(run / "saves") == [3, 4, 9]
    shutil.rmtree(copied)

    (run / "saves" / "step_3").rename(tmp_path / "archived")
    (run / "saves" / "step_3").symlink_to(tmp_path / "archived")
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(rows[0] + rows[3])
    done = train(*again)
    assert done.returncode == 0, done.stderr
    assert (
        "warning: metrics.jsonl has no rows of 2 of the 4 steps up to that save, the first of them step 2"
        in done.stderr
    )
    assert "saves/step_3 is not deleted: step_3 is a link or no folder; save_keep does not count it" in done.stderr
    assert list_saves(run / "saves") == [3, 5, 6]
    assert (tmp_path / "archived" / "manifest.json").exists()
    expected = losses(whole)
    assert losses(run) == [expected[0], *expected[3:]], "the digits of a run that nobody touched"
    assert json.loads((run / "saves" / "step_6" / "owner.json").read_text())["kind"] == "save"
