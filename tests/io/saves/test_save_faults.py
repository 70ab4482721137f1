"""Real files and file systems that fail: one clear message, and the save before is good."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import CapacityError, DamagedSaveError, MegatrainError
from megatrain_ray.io.files.disk_errors import check_room
from megatrain_ray.io.saves.save_folder import clean_unfinished, list_saves, save_room, set_aside, verify
from tests.support.saves import flip, make_state, read_save, write_save

ROOT = Path(__file__).parents[3]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip_content(path: Path) -> None:
    flip(path, 100)


def flip_padding(path: Path) -> None:
    """Flip a bit in the padding of a blob's first piece, 1952 bytes at most, to the next multiple of 4096.

    A manifest has no padding: there a bit of its text is flipped.
    """
    flip(path, 4000 if path.suffix != ".json" else 100)


@pytest.mark.pairwise
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("name", ["manifest.json", "part_1.working", "part_1.residual", "part_1.m", "part_1.v"])
@pytest.mark.parametrize("harm", [Path.unlink, truncate, make_folder, flip_content, flip_padding])
def test_a_damaged_file_is_named_and_the_save_before_restores(
    tmp_path: Path, compression: SaveCompression, name: str, harm: Callable[[Path], None]
) -> None:
    earlier = make_state("bf16")
    write_save(tmp_path, 1, earlier, compression=compression)
    folder = write_save(tmp_path, 2, make_state("bf16", 2), compression=compression)
    harm(folder / name)
    with pytest.raises(DamagedSaveError, match=str(folder / name)) as caught:
        read_save(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert any(str(folder / name) in problem for problem in verify(folder))
    if (folder / "manifest.json").is_file():
        set_aside(tmp_path, 2)
    assert list_saves(tmp_path) == [1]
    assert read_save(tmp_path, 1) == earlier


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_what_may_pass_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Permissions, a server that is away: a good save must not be set aside for it."""
    write_save(tmp_path, 1, make_state("bf16"))

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(MegatrainError, match=rf"cannot read .*/part_\d\.\w+: {os.strerror(number)}") as caught:
        read_save(tmp_path, 1)
    assert not isinstance(caught.value, DamagedSaveError)


def test_a_disk_that_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_save(tmp_path, 1, make_state("bf16"))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        DamagedSaveError, match=r"cannot read .*/part_\d\.\w+: Input/output error \(\w+ of \S+, elements"
    ):
        read_save(tmp_path, 1)


def test_room_is_checked_with_the_arithmetic(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    free = stats.f_bavail * stats.f_frsize
    check_room(tmp_path / "not" / "there" / "yet", free // 2, "the save", "free some")
    message = rf"no room for 3 saves in {tmp_path}: up to .*iB needed, .*iB free, .*iB missing; free some"
    with pytest.raises(CapacityError, match=message):
        check_room(tmp_path, 2 * free, "3 saves", "free some")


def test_room_for_a_save_is_little_more_than_its_state() -> None:
    assert 1.0 < save_room(37 * 10**9, 38, 1) / (37 * 10**9) < 1.005


def on_small_disk(folder: Path, scenario: str) -> None:
    """Run `scenario` in a process that sees a file system of 1 MiB in `folder`, with a save of step 1 on it."""
    script = f"""
import asyncio, subprocess, sys
from pathlib import Path
saves = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", saves], stderr=subprocess.DEVNULL).returncode:
    sys.exit(77)
import pytest
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.saves.save_folder import *
from tests.support.saves import *
state = make_state("bf16")
write_save(saves, 1, state)
{scenario}
assert [p.name for p in saves.iterdir() if p.is_dir()] == ["step_1"]
assert read_save(saves, 1) == state
"""
    command = ["unshare", "--mount", sys.executable, "-c", script, str(folder)]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip(f"no file system can be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_disk_that_gets_full_while_a_part_is_written(tmp_path: Path, compression: SaveCompression) -> None:
    on_small_disk(
        tmp_path,
        f"""
folder = prepare_save(saves, 2)
big = Piece("big", "residual", 0, 2 << 20, [memoryview(random.Random(0).randbytes(4 << 20))])
message = r"cannot write .*part_0.residual: No space left on device, .* free there; step_2 is abandoned, the saves"
with pytest.raises(DiskFullError, match=message):
    asyncio.run(write_part(folder, 0, [big], compression={compression!r}))
assert list_saves(saves) == [1]
abandon_save(saves, 2)
""",
    )


def test_a_disk_that_is_full_when_the_manifest_is_written(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
folder = prepare_save(saves, 2)
part = asyncio.run(write_part(folder, 0, pieces_of(make_state("bf16", 2), "bf16", 0, 1)))
with pytest.raises(OSError), (saves / "filler").open("wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
with pytest.raises(DiskFullError, match=r"cannot write .*step_2/manifest.json: No space left on device, 0 B are free"):
    commit_save(saves, 2, make_manifest([part], step=2))
""",
    )


def test_a_disk_that_became_read_only(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
subprocess.run(["mount", "-o", "remount,ro", saves], check=True)
with pytest.raises(MegatrainError, match=r"cannot make .*step_2: Read-only file system"):
    prepare_save(saves, 2)
with pytest.raises(MegatrainError, match=r"cannot write .*step_1/part_0\\.\\w+: Read-only file system"):
    asyncio.run(write_part(save_folder(saves, 1), 0, pieces_of(state, "bf16", 0, 1)))
with pytest.raises(MegatrainError, match=r"cannot rename .*step_1: Read-only file system"):
    set_aside(saves, 1)
""",
    )


@pytest.mark.parametrize("act", [list_saves, clean_unfinished])
def test_a_save_that_cannot_be_looked_at_just_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]
) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"))
    look = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        if self.name == "manifest.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return look(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        with pytest.raises(MegatrainError, match=f"cannot read {folder}/manifest.json: Stale file handle"):
            act(tmp_path)
    assert read_save(tmp_path, 1) == make_state("bf16")
