"""Folders that appear whole: under another name until then, one writer at a time, gone when it fails or dies."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.files.partial_folder import complete_or_absent, remove_abandoned
from tests.support.partial_folders import killed_while_writing


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_has_its_name_when_the_block_is_over(tmp_path: Path) -> None:
    with complete_or_absent(tmp_path / "new" / "out") as folder:
        (folder / "file").write_text("all")
        assert not (tmp_path / "new" / "out").exists()
    assert names(tmp_path) == ["new", "new/out", "new/out/file"]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_failure(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), complete_or_absent(tmp_path / "out") as folder:
        (folder / "file").touch()
        raise error
    assert names(tmp_path) == []
    with (
        pytest.raises(MegatrainError, match=r"cannot write .*gone: No such file"),
        complete_or_absent(tmp_path / "out"),
    ):
        (tmp_path / "gone").read_bytes()


def test_a_full_disk_is_told_with_what_is_free_where_a_copy_goes(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "from", None, str(tmp_path / "to"))
    message = f"^cannot write {tmp_path}/to: No space left on device, .*B are free there$"
    with pytest.raises(DiskFullError, match=message), complete_or_absent(tmp_path / "out"):
        raise full
    assert names(tmp_path) == []


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with complete_or_absent(tmp_path / "out") as folder:
        (folder / "mine").touch()
        with pytest.raises(ConfigError, match="out is being written by another process"):
            complete_or_absent(tmp_path / "out").__enter__()
        assert remove_abandoned(tmp_path) == []
        assert (folder / "mine").exists()
    assert names(tmp_path) == ["out", "out/mine"]


def test_what_a_killed_one_left_goes_with_the_next_or_by_itself(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "out")
    with complete_or_absent(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert names(tmp_path) == ["out", "out/new"]
    killed_while_writing(tmp_path / "other")
    (tmp_path / ".file.partial").touch()
    (tmp_path / ".fresh.partial").mkdir()  # its process died before it wrote the mark
    (tmp_path / ".half.partial").mkdir()
    (tmp_path / ".half.partial" / "owner.json").touch()
    assert remove_abandoned(tmp_path) == [tmp_path / f".{name}.partial" for name in ("fresh", "half", "other")]
    assert names(tmp_path) == [".file.partial", "out", "out/new"]


def test_what_has_the_name_of_an_unfinished_folder_and_no_mark_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    (tmp_path / ".out.partial").symlink_to(mine)
    (tmp_path / ".other.partial").mkdir()
    (tmp_path / ".other.partial" / "file").touch()
    for name, reason in (("out", "out.partial is a link or no folder"), ("other", "it has no mark")):
        with pytest.raises(ConfigError, match=f"cannot write to .*/{name}: .*{reason}.*; move it away"):
            complete_or_absent(tmp_path / name).__enter__()
    assert remove_abandoned(tmp_path) == []
    assert (mine / "file").exists()
    assert (tmp_path / ".other.partial" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user at hand")
def test_what_another_user_left_is_no_traceback() -> None:
    """In a cache that users share, their unfinished folder stays; only who wants its very name is refused."""
    with tempfile.TemporaryDirectory() as shared:  # pytest's own folders are closed to others
        shared_by_users(Path(shared))


def shared_by_users(folder: Path) -> None:
    killed_while_writing(folder / "other")
    folder.chmod(0o777)
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from megatrain_ray.errors import ConfigError\n"
        "from megatrain_ray.io.files.partial_folder import complete_or_absent, remove_abandoned\n"
        "os.setuid(65534)\nfolder = Path(sys.argv[1])\nassert remove_abandoned(folder) == []\n"
        "with complete_or_absent(folder / 'mine'):\n    pass\n"
        "try:\n    complete_or_absent(folder / 'other').__enter__()\nexcept ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    problem = (
        f"{folder}/.other.partial is not deleted: it belongs to another user; move it away, or name another folder"
    )
    assert done.stdout == f"cannot write to {folder}/other: {problem}\n", done.stderr
    assert done.returncode == 0, done.stderr
