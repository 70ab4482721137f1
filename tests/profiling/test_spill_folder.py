"""The folder of spill.path, here and on other hosts: refused where it cannot be written to, told of in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatrain_ray.config.groups import SpillConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.storage.disk_io import SpillFile
from megatrain_ray.profiling import spill_folder
from megatrain_ray.profiling.spill_disk import with_spill
from megatrain_ray.profiling.spill_folder import OtherHost
from megatrain_ray.workers.arena_owner import ArenaOwner
from tests.support.spill_folders import MACHINE, imitated_disks, space


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    return imitated_disks(monkeypatch, tmp_path / "cache")


@pytest.mark.parametrize("path", ["file", "file/x", "/proc/none", "/proc/self", "loose"])
def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path, measurements: list[Path], path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loose").symlink_to("nowhere")
    with pytest.raises(
        ConfigError, match=rf"^spill\.path: cannot write to {tmp_path / path}: .*; name a folder"
    ) as info:
        space(tmp_path / path)
    assert (info.value.exit_code, str(info.value).count("\n")) == (2, 0)
    if path.startswith("file"):
        with pytest.raises(ConfigError, match=r"^spill\.path: cannot write to .*: Not a directory; "):
            space(tmp_path / path, imagined=True)


def test_a_folder_in_memory_is_told(
    tmp_path: Path, measurements: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What spills to tmpfs is in host memory all the same, and no row of a plan has it."""
    monkeypatch.setattr(spill_folder, "read_text", lambda path: _mounts(tmp_path, "tmpfs"))
    with_spill(MACHINE, SpillConfig(path=str(tmp_path)))
    assert "is on tmpfs, which is host memory" in caplog.text
    caplog.clear()
    monkeypatch.setattr(spill_folder, "read_text", lambda path: _mounts(tmp_path, "ext4"))
    with_spill(MACHINE, SpillConfig(path=str(tmp_path)))
    assert "host memory" not in caplog.text


def _mounts(folder: Path, kind: str) -> str:
    device = folder.stat().st_dev
    return f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime - {kind} none rw\n"


ELSEWHERE = "10.0.0.2 (host 1)"


def owner_elsewhere(folder: Path, *, by_kvikio: bool = False) -> ArenaOwner:
    files = {"spill-0": SpillFile(folder, 4096)}
    return ArenaOwner({"a": 4096}, files=files, other=OtherHost(ELSEWHERE, folder, by_kvikio))


def test_what_is_wrong_with_the_disk_of_another_host_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena owner there, which makes the files, tells what is wrong, where, and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        owner_elsewhere(tmp_path / "file" / "spill")
    assert str(refused.value) == (
        f"spill.path: cannot write to {tmp_path}/file/spill on {ELSEWHERE}: Not a directory; name a folder on a local "
        "NVMe drive that can be written to"
    )
    monkeypatch.setattr(spill_folder, "unusable", lambda folder: "no driver")
    with pytest.raises(
        ConfigError, match=rf"^spill\.io: kvikio does not work for {tmp_path} on 10.* \(host 1\): no dr"
    ):
        owner_elsewhere(tmp_path, by_kvikio=True)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DiskFullError, match=rf"^10\.0\.0\.2 \(host 1\): cannot reserve .* {tmp_path}: full, .* lower spill"
    ):
        owner_elsewhere(tmp_path)


def test_a_folder_in_the_memory_of_another_host_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = owner_elsewhere(tmp_path / "new")
    assert owner.memory_warning() is None
    monkeypatch.setattr(spill_folder, "IN_MEMORY", kinds_of_file_systems())
    told = owner.memory_warning()
    assert told and told.startswith(f"spill.path: {tmp_path}/new on {ELSEWHERE} is on ")
    assert ArenaOwner({}).memory_warning() is None, "the driver's was told of with the plan"
    owner.stop()
    owner.run()


def kinds_of_file_systems() -> tuple[str, ...]:
    """Return the kinds of all file systems that there are here."""
    return tuple(line.partition(" - ")[2].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines())
