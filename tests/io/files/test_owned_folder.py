"""Which folders this program deletes: those with its mark, of this user, that nobody uses, and reached by no link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.io.files.owned_folder import (
    MARK_NAME,
    FolderInUseError,
    FolderKind,
    NotOwnedError,
    OwnedFolder,
    has_mark,
    read_mark,
    remove_owned,
    why_not_owned,
)
from megatrain_ray.io.files.scratch_folder import scratch_folder
from tests.support.owned_folders import left_by_a_dead_process, made_by

SCRATCH = FolderKind.SCRATCH


def change_mark(folder: Path, **values: object) -> None:
    tree = json.loads((folder / MARK_NAME).read_text())
    (folder / MARK_NAME).write_text(json.dumps(tree | values))


def test_a_folder_of_a_dead_process_is_deleted_with_all_in_it_but_what_links_lead_to(tmp_path: Path) -> None:
    folder, outside = left_by_a_dead_process(tmp_path / "left"), tmp_path / "outside"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").touch()
    outside.mkdir()
    (outside / "precious").touch()
    (folder / "link").symlink_to(outside)
    (folder / "deep" / "link").symlink_to(outside / "precious")
    assert has_mark(folder, SCRATCH)
    remove_owned(folder, SCRATCH)
    assert not folder.exists()
    assert (outside / "precious").exists()


def test_a_folder_that_another_process_takes_for_abandoned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has its mark, it looks like what a killed process leaves."""
    mark, seen = OwnedFolder.mark_existing, []

    def deleted_first(path: Path, *arguments: Any) -> OwnedFolder:
        if not seen:
            path.rmdir()
        seen.append(path)
        return mark(path, *arguments)

    monkeypatch.setattr(OwnedFolder, "mark_existing", staticmethod(deleted_first))
    OwnedFolder.make(tmp_path / "new", SCRATCH).release()
    assert has_mark(tmp_path / "new", SCRATCH)
    assert len(seen) == 2


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no mark": (lambda folder: (folder / MARK_NAME).unlink(), "it has no mark"),
    "mark cut": (lambda folder: os.truncate(folder / MARK_NAME, 100), "it has no mark"),
    "mark empty": (lambda folder: os.truncate(folder / MARK_NAME, 0), "it has no mark"),
    "mark of another program": (lambda folder: change_mark(folder, made_by="x"), "it has no mark"),
    "mark without its kind": (lambda folder: change_mark(folder, kind="treasure"), "it has no mark"),
    "mark with more": (lambda folder: change_mark(folder, more=1), "it has no mark"),
    "mark for something else": (lambda folder: change_mark(folder, kind="run"), "says that it is a run"),
    "mark of another user": (lambda folder: change_mark(folder, uid=os.geteuid() + 1), "belongs to another user"),
    "mark of a living process": (
        lambda folder: change_mark(folder, **made_by(os.getppid())),
        f"process {os.getppid()}, which made it, still runs",
    ),
    "mark of another folder": (lambda folder: change_mark(folder, inode=1), "a copy of what this program made"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_folder_without_the_right_mark_stays(tmp_path: Path, harm: str) -> None:
    folder = left_by_a_dead_process(tmp_path / "left")
    (folder / "precious").touch()
    change, reason = HARMS[harm]
    change(folder)
    with pytest.raises(NotOwnedError, match=f"left is not deleted: .*{reason}"):
        remove_owned(folder, SCRATCH)
    assert reason in str(why_not_owned(folder, SCRATCH))
    assert (folder / "precious").exists()


def test_a_mark_that_is_a_link_is_none(tmp_path: Path) -> None:
    folder, other = left_by_a_dead_process(tmp_path / "left"), tmp_path / "mine"
    other.mkdir()
    (other / MARK_NAME).symlink_to(folder / MARK_NAME)
    assert not has_mark(other)
    with pytest.raises(NotOwnedError):
        remove_owned(other, SCRATCH)
    os.mkfifo(tmp_path / "mine" / "fifo")
    (other / MARK_NAME).unlink()
    (other / "fifo").rename(other / MARK_NAME)
    assert read_mark(other) is None, "and it is not waited for"


def test_a_copy_of_a_folder_stays(tmp_path: Path) -> None:
    folder = left_by_a_dead_process(tmp_path / "left")
    shutil.copytree(folder, tmp_path / "backup")
    with pytest.raises(NotOwnedError, match="backup is not deleted: it is a copy"):
        remove_owned(tmp_path / "backup", SCRATCH)
    remove_owned(folder, SCRATCH)


def test_a_link_to_a_folder_is_not_the_folder(tmp_path: Path) -> None:
    """The way to its parent may lead over links of the user's: a run directory on another disk."""
    real = left_by_a_dead_process(tmp_path / "real" / "left")
    (tmp_path / "leaf").symlink_to(real)
    assert not has_mark(tmp_path / "leaf")
    with pytest.raises(NotOwnedError, match="leaf is a link or no folder"):
        remove_owned(tmp_path / "leaf", SCRATCH)
    assert real.exists()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    remove_owned(tmp_path / "linked" / "left", SCRATCH)
    assert not real.exists()


def test_what_a_living_process_made_under_the_runs_lock_may_go(tmp_path: Path) -> None:
    """A notebook lives on after its training, and another process resumes the run."""
    folder = left_by_a_dead_process(tmp_path / "left", FolderKind.SAVE)
    change_mark(folder, **made_by(os.getppid()))
    remove_owned(folder, FolderKind.SAVE)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user at hand")
def test_another_users_empty_folder_is_not_used(tmp_path: Path) -> None:
    """That user could put links into it."""
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(FileExistsError):
        OwnedFolder.make(tmp_path / "theirs", SCRATCH)
    (tmp_path / "mine").mkdir()
    OwnedFolder.make(tmp_path / "mine", SCRATCH).remove()
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError):
        OwnedFolder.make(tmp_path / "mine", FolderKind.SESSION)


def test_a_mark_that_nests_without_end_is_none(tmp_path: Path) -> None:
    (tmp_path / MARK_NAME).write_text("[" * 4000)
    assert read_mark(tmp_path) is None
    assert "it has no mark" in str(why_not_owned(tmp_path, SCRATCH))


def test_a_token_is_asked_for_where_it_is_given(tmp_path: Path) -> None:
    folder = left_by_a_dead_process(tmp_path / "left", token="mine")
    with pytest.raises(NotOwnedError, match="another run made it"):
        remove_owned(folder, SCRATCH, token="other")
    remove_owned(folder, SCRATCH, token="mine")


def test_what_is_held_stays_and_its_holder_may_delete_it(tmp_path: Path) -> None:
    """A process in another container cannot be looked up: there its lock says that it lives."""
    held = OwnedFolder.make(tmp_path / "held", SCRATCH)
    with pytest.raises(FolderInUseError, match="another process uses it"):
        remove_owned(held.path, SCRATCH)
    held.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_closed_and_never_over_another(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "taken")
    made = OwnedFolder.make(tmp_path / "made", SCRATCH)
    assert made.path.stat().st_mode & 0o777 == 0o700
    for name in ("taken", "link", "made"):
        with pytest.raises(FileExistsError):
            OwnedFolder.make(tmp_path / name, SCRATCH)
    made.release()
    half_made = tmp_path / "half"
    half_made.mkdir()
    (half_made / MARK_NAME).touch()  # killed just here
    OwnedFolder.make(half_made, SCRATCH).remove()
    assert not half_made.exists()


def test_a_deletion_that_is_killed_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left_by_a_dead_process(tmp_path / "left")
    for name in ("a", "b"):
        (folder / name).mkdir()

    def die(name: str, *, dir_fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            remove_owned(folder, SCRATCH)
    assert has_mark(folder), "the mark goes last"
    remove_owned(folder, SCRATCH)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user at hand")
def test_another_users_folder_stays_whatever_its_mark_says(tmp_path: Path) -> None:
    folder = left_by_a_dead_process(tmp_path / "left")
    os.chown(folder, 65534, 65534)
    with pytest.raises(NotOwnedError, match="it belongs to another user"):
        remove_owned(folder, SCRATCH)
    os.chown(folder, 0, 0)
    os.chown(folder / MARK_NAME, 65534, 65534)
    with pytest.raises(NotOwnedError, match="it belongs to another user"):
        remove_owned(folder, SCRATCH)


def test_two_processes_that_delete_the_same_are_no_error(tmp_path: Path) -> None:
    for k in range(20):
        left_by_a_dead_process(tmp_path / str(k))
    code = (
        "import sys; from pathlib import Path; from contextlib import suppress\n"
        "from megatrain_ray.io.files.owned_folder import *\n"
        "sys.stdin.readline()\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    with suppress(NotOwnedError, OSError): remove_owned(path, FolderKind.SCRATCH)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert [child.communicate()[1] for child in children] == ["", ""]
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_folder_goes_and_so_do_those_of_killed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left_by_a_dead_process(tmp_path / "megatrain-eval-1")
    others = [left_by_a_dead_process(tmp_path / "megatrain-bench-1"), tmp_path / "megatrain-eval-mine"]
    others[1].mkdir()  # without a mark
    with scratch_folder("eval") as folder, scratch_folder("eval") as another:
        (folder / "file").touch()
        assert sorted(tmp_path.iterdir()) == sorted([*others, folder, another])
    assert sorted(tmp_path.iterdir()) == sorted(others)
