"""A save exists or it does not: killed, full, incomplete and half-deleted ones never look whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.blob_store import FileStore
from megatrain_ray.io.pieces import write_blobs
from megatrain_ray.io.save import (
    clean_unfinished,
    commit_save,
    list_saves,
    prepare_save,
    prune,
    save_folder,
    verify,
    write_part,
)
from tests.saves import make_manifest, make_state, pieces_of, read_save, write_save


def test_what_a_killed_save_left_is_no_save(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    torn = prepare_save(tmp_path, 2)
    asyncio.run(write_part(torn, 0, pieces_of(state, "bf16", 0, 2)))
    (torn / "manifest.json.partial").write_bytes(b"{")
    assert list_saves(tmp_path) == [1]
    assert prepare_save(tmp_path, 2) == torn
    assert list(torn.iterdir()) == []
    clean_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert read_save(tmp_path, 1) == state
    clean_unfinished(tmp_path / "none")


def test_nothing_is_committed_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what must survive a power failure: the manifest's bytes, the blobs' names, its name, the folders."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def note_fsync(fd: int) -> None:
        events.append("fsync " + Path(f"/proc/self/fd/{fd}").readlink().name)
        real_fsync(fd)

    def note_rename(source: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return real_rename(source, target)

    monkeypatch.setattr("os.fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    write_save(tmp_path / "saves", 4, make_state("fp32"), "fp32", 1)
    assert sorted(events[:3]) == ["fsync part_0.m", "fsync part_0.master", "fsync part_0.v"]
    assert events[3:] == [
        "fsync manifest.json.partial",
        "fsync step_4",
        "rename manifest.json",
        "fsync step_4",
        "fsync saves",
        f"fsync {tmp_path.name}",
    ]


class FaultyStore(FileStore):
    """The `fail_on`th write fails after its first chunk, as a full disk does."""

    def __init__(self, folder: Path, fail_on: int) -> None:
        super().__init__(folder)
        self._left = fail_on

    async def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        self._left -= 1
        if self._left:
            return await super().write(name, chunks)
        await super().write(name, [next(iter(chunks))])
        raise MegatrainError(f"cannot write {name}: No space left on device")


def test_a_disk_that_gets_full_leaves_the_last_save_good(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    folder = prepare_save(tmp_path, 2)
    with pytest.raises(MegatrainError, match=r"part_0.m: No space left"):
        asyncio.run(write_blobs(FaultyStore(folder, 3), 0, pieces_of(make_state("bf16", 9), "bf16", 0, 1)))
    assert list_saves(tmp_path) == [1]
    clean_unfinished(tmp_path)
    assert verify(save_folder(tmp_path, 1)) == []
    assert read_save(tmp_path, 1) == state


def test_a_save_that_is_not_whole_is_not_committed(tmp_path: Path) -> None:
    state, folder = make_state("bf16"), prepare_save(tmp_path, 1)
    parts = [asyncio.run(write_part(folder, k, pieces_of(state, "bf16", k, 2))) for k in (0, 1)]
    with pytest.raises(MegatrainError, match=r"step_1 would not be whole: working of embed: .*1000 elements once"):
        commit_save(tmp_path, 1, make_manifest(parts[:1]))
    with pytest.raises(MegatrainError, match="would not be whole"):
        commit_save(tmp_path, 1, make_manifest([*parts, parts[0]]))
    with (folder / "part_1.v").open("ab") as file:
        file.write(b"!")
    with pytest.raises(MegatrainError, match=r"part_1.v has another size"):
        commit_save(tmp_path, 1, make_manifest(parts))
    (folder / "part_1.v").unlink()
    with pytest.raises(MegatrainError, match=r"part_1.v: No such file"):
        commit_save(tmp_path, 1, make_manifest(parts))
    assert list_saves(tmp_path) == []


def test_a_good_save_is_never_overwritten(tmp_path: Path) -> None:
    write_save(tmp_path, 1, make_state("bf16"))
    with pytest.raises(MegatrainError, match="step_1 is a finished save already"):
        prepare_save(tmp_path, 1)
    assert verify(save_folder(tmp_path, 1)) == []


def test_the_last_saves_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 9, 100):
        write_save(tmp_path, step, make_state("fp32"), "fp32", 1)
    (tmp_path / "step_x").mkdir()
    assert list_saves(tmp_path) == [2, 9, 10, 100]
    prune(tmp_path, 3)
    assert list_saves(tmp_path) == [9, 10, 100]
    prune(tmp_path, 0)
    assert list_saves(tmp_path) == [100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_100", "step_x"]


def test_a_half_deleted_save_never_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_save(tmp_path, step, make_state("fp32"), "fp32", 1)
    events = list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"fsync with {list_saves(tmp_path)}"))

    def die(path: Path) -> None:
        assert events == ["fsync with [2]"], "the manifest's end is on disk before anything else goes"
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert list_saves(tmp_path) == [2]
    assert (save_folder(tmp_path, 1) / "part_0.m").exists()
