"""A run whose disk fails, or that is killed, at any of its calls that change the run directory; an export likewise.

The runs have threads for actors: the calls of other processes could not be seen.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_ray.io.saves.save_folder import list_saves, save_folder, verify
from tests.support.disk_faults import DiskCall, Moment, Moments, disk_calls
from tests.support.in_process import IN_PROCESS, actors_as_threads
from tests.support.runs import cli_here, config, exported_masters, losses, write_config
from tests.support.tiny import build_tiny

# Files whose loss is no reason to end a training; and the folder, which is closed to others if that can be done.
OPTIONAL = {"logs/driver.log", "history.jsonl", "."}
MOST_MOMENTS = 260
MOST_OF_EXPORT = 60
MOST_OF = {"train": 220, "eval": 190, "report": 8}  # of commands on a run that has a save
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)
FAULTS = 37  # of calls, evenly spaced; no multiple of the errors


@dataclass(frozen=True)
class Trained:
    """Holds an undisturbed run of six steps, which saves three times, and where it can be killed.

    It keeps one save, and the best one, which is the first: its held-out loss rises.

    Every trial is made in `run_dir`, since that is part of the settings.

    begun: what a kill after the first save leaves, once for each command of MOST_OF.
    """

    run_dir: Path
    file: Path
    losses: Sequence[float]
    masters: dict[str, Tensor]
    moments: Sequence[Moment]
    calls: Sequence[DiskCall]
    begun: Sequence[Moment]

    def start(self) -> subprocess.CompletedProcess[str]:
        return IN_PROCESS(str(self.file))

    def assert_goes_on(self, *, cleans: bool = True) -> None:
        """Start the same command once more, and assert that nothing shows what had happened before.

        cleans: False: what could not be deleted may stay while the process that made it, which is this one, lives.
        """
        done = self.start()
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert losses(self.run_dir) == self.losses
        out = self.run_dir.with_name("export")
        masters = exported_masters(self.run_dir, out)
        shutil.rmtree(out)
        assert all(torch.equal(masters[name], values) for name, values in self.masters.items())
        assert not cleans or unfinished(self.run_dir) == []


def unfinished(run_dir: Path) -> list[str]:
    """Return what a run that was cut off leaves: temporary files and folders, and saves without a manifest.

    An empty folder is not counted: the next save of that step uses it.
    """
    left = [path.name for path in run_dir.rglob("*") if path.suffix in (".new", ".partial")]
    saves = run_dir / "saves"
    whole = {f"step_{step}" for step in list_saves(saves)}
    return left + (
        [path.name for path in saves.iterdir() if path.name not in whole and any(path.iterdir())]
        if saves.is_dir()
        else []
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("killed")
    run_dir = folder / "run"
    run_dir.mkdir()
    (folder / "held_out.txt").write_text("漢字" * 50)  # less and less like what is learned
    tree = config(
        run_dir, build_tiny(folder / "model"), train__steps=6, save_every=2, save_keep=1, save_best=True, eval_every=2,
        data__eval_path=str(folder / "held_out.txt"), log__tensorboard=False,
    )  # fmt: skip
    path = write_config(folder / "config.yaml", tree)
    calls: list[DiskCall] = []
    moments, begun = Moments(run_dir, folder / "moments"), Moments(run_dir, folder / "begun")

    def see(call: DiskCall) -> None:
        calls.append(call)
        moments(call)
        if call.path == "saves/step_4/owner.json" and not begun.all:
            for _ in MOST_OF:
                begun(call)

    with disk_calls(run_dir, see):
        done = IN_PROCESS(str(path))
    assert done.returncode == 0, done.stderr
    masters = exported_masters(run_dir, folder / "masters")
    assert len(moments.all) <= MOST_MOMENTS
    different = list(dict.fromkeys(calls))
    return Trained(run_dir, path, losses(run_dir), masters, moments.all, different, begun.all)


def put_back(trained: Trained, moment: Moment) -> None:
    """Make the run directory what it was at that moment. The copy is used up, as its marks are of its inode."""
    shutil.rmtree(trained.run_dir, ignore_errors=True)
    moment.folder.rename(trained.run_dir)


def test_at_every_moment_the_newest_save_is_whole(trained: Trained) -> None:
    seen = []
    for moment in trained.moments:
        saves = moment.folder / "saves"
        steps = list_saves(saves)
        if moment.call.path.startswith("saves/step_"):
            assert [problem for step in steps for problem in verify(save_folder(saves, step))] == [], moment.call
        seen.append(tuple(steps))
    assert list(dict.fromkeys(seen)) == [(), (2,), (2, 4), (2, 4, 6), (2, 6)]  # and never none again


@pytest.mark.parametrize(
    "call",
    [DiskCall("rename", "saves/step_4/manifest.json"), DiskCall("unlink", "saves/step_4/part_0.v")],
    ids=str,
)
def test_the_same_command_goes_on_from_a_kill(trained: Trained, call: DiskCall) -> None:
    put_back(trained, next(moment for moment in trained.moments if moment.call == call))
    assert len(unfinished(trained.run_dir)) > 0
    trained.assert_goes_on()


@pytest.mark.long
@pytest.mark.parametrize("number", range(MOST_MOMENTS))
def test_the_same_command_goes_on_from_any_kill(trained: Trained, number: int) -> None:
    if number < len(trained.moments) and trained.moments[number].folder.exists():
        put_back(trained, trained.moments[number])
        trained.assert_goes_on()


@pytest.mark.spread(1)
@pytest.mark.parametrize("position", [(k + FAULTS // 2) % FAULTS for k in range(FAULTS)])
def test_a_disk_that_fails_ends_the_run_with_one_message_and_without_a_trace(trained: Trained, position: int) -> None:
    failing, number = trained.calls[position * len(trained.calls) // FAULTS], ERRORS[position % len(ERRORS)]
    deletes = failing.name in ("unlink", "rmdir")

    def fail(call: DiskCall) -> None:
        if call == failing:
            raise OSError(number, os.strerror(number), str(trained.run_dir / call.path))

    shutil.rmtree(trained.run_dir, ignore_errors=True)
    with disk_calls(trained.run_dir, fail):
        done = trained.start()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode:
        assert len(errors) == 1, done.stderr
        assert os.strerror(number) in errors[0]
        assert str(trained.run_dir) in errors[0]
    else:
        assert failing.path in OPTIONAL or deletes
        assert errors == []
    assert "Traceback" not in done.stderr
    assert deletes or unfinished(trained.run_dir) == []
    trained.assert_goes_on(cleans=not deletes)


@pytest.fixture(scope="module")
def export_moments(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Moment]:
    """Return where an export of the run can be killed."""
    if not (trained.run_dir / "config.yaml").exists():
        trained.start()
    folder = tmp_path_factory.mktemp("killed_export")
    (folder / "all").mkdir()
    moments = Moments(folder / "all", folder / "moments")
    with disk_calls(folder / "all", moments):
        exported_masters(trained.run_dir, folder / "all" / "model")
    moments(DiskCall("end", "model"))  # nothing was killed: the last is whole
    assert len(moments.all) <= MOST_OF_EXPORT
    return moments.all


@pytest.mark.spread(3)
@pytest.mark.parametrize("number", range(MOST_OF_EXPORT))
def test_the_same_export_is_made_after_any_kill(
    trained: Trained, export_moments: Sequence[Moment], number: int
) -> None:
    if number >= len(export_moments):
        return
    (call, folder), whole = export_moments[number], export_moments[-1].folder / "model"
    if (folder / "model").exists():
        assert names(folder / "model") - {"owner.json"} == names(whole)
        return
    masters = exported_masters(trained.run_dir, folder / "model")
    assert all(torch.equal(masters[name], values) for name, values in trained.masters.items()), call
    assert names(folder) == {"model"}, call


class Commands:
    """Runs commands on the run as a kill after its first save leaves it. The temporary folder is in its directory."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._starts = dict(zip(MOST_OF, trained.begun, strict=True))
        self._trained, self._folder = trained, folder
        self._moments: dict[str, Sequence[Moment]] = {}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        if command == "train":
            return self._trained.start()
        with actors_as_threads():
            return cli_here(command, str(self._trained.run_dir))

    def moments(self, command: str) -> Sequence[Moment]:
        if command not in self._moments:
            put_back(self._trained, self._starts[command])
            (self._trained.run_dir / "tmp").mkdir()
            moments = Moments(self._trained.run_dir, self._folder / command)
            with disk_calls(self._trained.run_dir, moments):
                done = self.run(command)
            assert done.returncode == 0, done.stderr
            assert len(moments.all) <= MOST_OF[command]
            self._moments[command] = moments.all
        return self._moments[command]


@pytest.fixture(scope="module")
def commands(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(trained, tmp_path_factory.mktemp("commands"))


@pytest.mark.long
@pytest.mark.parametrize(("command", "number"), [(name, n) for name, most in MOST_OF.items() for n in range(most)])
def test_the_same_command_does_its_work_after_a_kill_of_it(
    trained: Trained, commands: Commands, command: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(trained.run_dir / "tmp"))
    moments = commands.moments(command)
    if number >= len(moments):
        return
    put_back(trained, moments[number])
    done = commands.run(command)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    left = [path for path in (trained.run_dir / "tmp").iterdir() if holds_something(path)]
    assert left + [Path(name) for name in unfinished(trained.run_dir)] == []
    if command == "train":
        assert losses(trained.run_dir) == trained.losses


def holds_something(folder: Path) -> bool:
    """Return whether a folder has files, but for a mark that a kill left empty."""
    return any(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
