"""The demo and benchmarks delete what they made themselves, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.scratch import fresh
from megatrain_ray.io.files.owned_folder import FolderKind, has_mark
from megatrain_ray.run.run_lock import hold_lock
from tests.support.owned_folders import forget_maker
from tests.support.runs import ROOT


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def test_the_demo_says_what_it_deletes(tmp_path: Path, demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    demo.begin_anew()
    assert capsys.readouterr().out == ""
    (tmp_path / demo.RUN).mkdir()
    (tmp_path / demo.RUN / "metrics.jsonl").touch()
    with hold_lock(tmp_path / demo.RUN), pytest.raises(SystemExit, match="runs/demo/run is in use by process"):
        demo.begin_anew()
    (tmp_path / demo.FOLDER / "notes.txt").touch()
    with pytest.raises(SystemExit, match=r"runs/demo holds notes.txt, which is not the demo's"):
        demo.begin_anew()
    (tmp_path / demo.FOLDER / "notes.txt").unlink()
    demo.begin_anew()
    assert capsys.readouterr().out == "deleting runs/demo, which an earlier demo made\n"
    assert [path.name for path in (tmp_path / demo.FOLDER).iterdir()] == ["owner.json"]


def test_the_demo_leaves_what_it_did_not_make(tmp_path: Path, demo: ModuleType) -> None:
    (tmp_path / demo.FOLDER).mkdir(parents=True)
    (tmp_path / demo.FOLDER / "file").write_text("mine")
    with pytest.raises(SystemExit, match=r"runs/demo is not deleted: it has no mark .* move runs/demo away"):
        demo.begin_anew()
    (tmp_path / demo.FOLDER).rename(tmp_path / "elsewhere")
    (tmp_path / demo.FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="demo is a link or no folder"):
        demo.begin_anew()
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


def test_benchmarks_begin_with_folders_of_their_own(tmp_path: Path) -> None:
    place = fresh(tmp_path / "deep" / "real_7b")
    place.mkdir()
    forget_maker(place.parent)
    assert not fresh(tmp_path / "deep" / "real_7b").exists()
    assert has_mark(place.parent, FolderKind.SCRATCH)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(SystemExit, match="mine holds file, which no benchmark made"):
        fresh(tmp_path / "mine")
    (tmp_path / "mine" / "file").rename(tmp_path / "mine" / "run")
    with pytest.raises(SystemExit, match="mine is not deleted: it has no mark"):
        fresh(tmp_path / "mine")
    assert (tmp_path / "mine" / "run").exists()
