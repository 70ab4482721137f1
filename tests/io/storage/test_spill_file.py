"""Spill files: they have their room and no name, and nothing of them is left, whatever happens."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError, UnreadableError
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, aligned_block
from megatrain_ray.io.storage.disk_io import HeldFiles, create_spill_file

NBYTES = 5 * ALIGN_BYTES


@contextmanager
def spill_file(folder: Path) -> Iterator[int]:
    fd = create_spill_file(folder, "spill", NBYTES)
    try:
        yield fd
    finally:
        os.close(fd)


def held_in(folder: Path) -> list[str]:
    """Descriptors of this process on files that were in the folder."""
    targets = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return [target for target in targets if target.startswith(f"{folder}/")]


def test_it_has_its_room_and_no_name(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "spill"
    with spill_file(folder) as fd:
        assert list(folder.iterdir()) == []
        status = os.fstat(fd)
        assert (status.st_size, status.st_nlink) == (NBYTES, 0)
        assert status.st_blocks * 512 >= NBYTES
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert os.pread(fd, NBYTES + 1, 0) == bytes(NBYTES)
        assert not os.get_inheritable(fd), "a program that is started does not hold it"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_an_error_that_says_what_to_set(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = (
        rf"cannot reserve 20.00 KiB \({NBYTES} bytes\) to spill to in {tmp_path}: {os.strerror(number)}, "
        r"[0-9.]+ .?i?B are free there; lower spill.limit, or set spill.path to a folder with more room"
    )
    with pytest.raises(DiskFullError, match=message):
        create_spill_file(tmp_path, "spill", NBYTES)
    assert list(tmp_path.iterdir()) == held_in(tmp_path) == []


def test_what_is_free_is_told_when_the_part_that_fitted_was_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    def free_bytes(path: Path) -> int:
        held.extend(held_in(tmp_path))
        return 0

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr("megatrain_ray.io.files.disk_errors.free_bytes", free_bytes)
    with pytest.raises(DiskFullError, match=r"full, 0 B are free"):
        create_spill_file(tmp_path, "spill", NBYTES)
    assert held == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(MegatrainError, match=f"{re.escape(str(folder))}: .*; set spill.path to a folder that"):
            create_spill_file(folder, "spill", NBYTES)
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_file_of_another_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "spill").write_bytes(b"kept")
    with pytest.raises(MegatrainError, match="File exists"):
        create_spill_file(tmp_path, "spill", NBYTES)
    assert (tmp_path / "spill").read_bytes() == b"kept"


@pytest.mark.parametrize("nbytes", [-ALIGN_BYTES, 0, 1, ALIGN_BYTES + 1])
def test_only_whole_blocks(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"of {nbytes} bytes; expected a multiple of {ALIGN_BYTES}, and not 0"):
        create_spill_file(tmp_path, "spill", nbytes)


async def test_errors_name_the_file_as_it_was_called(tmp_path: Path) -> None:
    block = aligned_block(2 * ALIGN_BYTES)
    with spill_file(tmp_path) as fd:
        async with HeldFiles().update(str(fd)) as blob:
            with pytest.raises(MegatrainError, match=f"cannot write {tmp_path}/spill .* up to byte {NBYTES + 4096}"):
                await blob.write_at(NBYTES - ALIGN_BYTES, block)
            with pytest.raises(UnreadableError, match=f"{tmp_path}/spill .* truncated"):
                await blob.read_into(NBYTES - ALIGN_BYTES, block)
        assert os.fstat(fd).st_size == NBYTES
    with pytest.raises(UnreadableError, match=f"/fd/{fd}: No such file"):
        HeldFiles().size(str(fd))
