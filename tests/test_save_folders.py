"""A save exists or it does not: killed, full, incomplete and half-deleted ones never look whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_ray.errors import DamagedSaveError, MegatrainError
from megatrain_ray.io.save import (
    abandon_save,
    clean_unfinished,
    commit_save,
    list_saves,
    list_set_aside,
    prepare_save,
    prune,
    save_folder,
    set_aside,
    verify,
    write_part,
)
from tests.saves import flip, make_manifest, make_state, pieces_of, read_save, write_save


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


def test_an_abandoned_save_leaves_nothing_and_a_finished_one_cannot_be_abandoned(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    asyncio.run(write_part(prepare_save(tmp_path, 2), 0, pieces_of(state, "bf16", 0, 2)))
    for step in (1, 2, 3):
        abandon_save(tmp_path, step)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert read_save(tmp_path, 1) == state


def test_a_damaged_save_is_set_aside_and_its_step_can_be_saved_again(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    for name in ("step_2.damaged", "step_2.damaged.2", "step_2.damaged.3"):
        blob = write_save(tmp_path, 2, make_state("bf16", 2)) / "part_0.m"
        flip(blob, 0)
        kept = blob.read_bytes()
        aside = set_aside(tmp_path, 2)
        assert aside == tmp_path / name
        assert (aside / "part_0.m").read_bytes() == kept
        assert list_saves(tmp_path) == [1]
    clean_unfinished(tmp_path)
    prune(tmp_path, 1)
    assert [p.name for p in list_set_aside(tmp_path)] == ["step_2.damaged", "step_2.damaged.2", "step_2.damaged.3"]
    assert read_save(tmp_path, 1) == state


def test_putting_aside_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_save(tmp_path, 2, make_state("fp32"), "fp32", 1)
    events: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"{Path(f'/proc/self/fd/{fd}').readlink()}"))
    set_aside(tmp_path, 2)
    assert events == [str(tmp_path)]
    with pytest.raises(MegatrainError, match=r"cannot rename .*step_2: No such file"):
        set_aside(tmp_path, 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"!")


@pytest.mark.parametrize(
    ("told", "harm", "message"),
    [
        ([0], None, "step_1 would not be whole: working of embed: .*1000 elements once"),
        ([0, 1, 0], None, "would not be whole"),
        ([0, 1], append, "part_1.v has another size"),
        ([0, 1], Path.unlink, "part_1.v: No such file"),
    ],
)
def test_a_save_that_is_not_whole_is_not_committed(
    tmp_path: Path, told: list[int], harm: Callable[[Path], None] | None, message: str
) -> None:
    state, folder = make_state("bf16"), prepare_save(tmp_path, 1)
    parts = [asyncio.run(write_part(folder, k, pieces_of(state, "bf16", k, 2))) for k in (0, 1)]
    if harm:
        harm(folder / "part_1.v")
    with pytest.raises(MegatrainError, match=message) as caught:
        commit_save(tmp_path, 1, make_manifest([parts[k] for k in told]))
    assert not isinstance(caught.value, DamagedSaveError), "the save that was restored would be set aside"
    assert not folder.exists()


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
