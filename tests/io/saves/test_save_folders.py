"""A save exists or it does not: killed, full, incomplete and half-deleted ones never look whole."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatrain_ray.errors import DamagedSaveError, MegatrainError
from megatrain_ray.io.files.owned_folder import MARK_NAME
from megatrain_ray.io.saves.save_folder import (
    abandon_save,
    clean_unfinished,
    commit_save,
    in_the_way,
    list_saves,
    list_set_aside,
    prepare_save,
    prune,
    save_folder,
    set_aside,
    verify,
    why_kept,
    write_part,
)
from megatrain_ray.io.saves.save_writer import NonFiniteStateError, Piece
from tests.support.owned_folders import forget_maker
from tests.support.saves import flip, make_manifest, make_state, pieces_of, read_save, write_save


def test_what_a_killed_save_left_is_no_save(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    torn = prepare_save(tmp_path, 2)
    asyncio.run(write_part(torn, 0, pieces_of(state, "bf16", 0, 2)))
    (torn / "manifest.json.partial").write_bytes(b"{")
    assert list_saves(tmp_path) == [1]
    assert prepare_save(tmp_path, 2) == torn
    assert [file.name for file in torn.iterdir()] == [MARK_NAME]
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
    assert events[:2] == ["fsync owner.json", "fsync step_4"]
    assert sorted(events[2:5]) == ["fsync part_0.m", "fsync part_0.master", "fsync part_0.v"]
    assert events[5:] == [
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
    prune(tmp_path, 1, kept={9, 50, None})
    assert list_saves(tmp_path) == [9, 100], "those that are kept do not count"
    prune(tmp_path, 1, kept={100})
    assert list_saves(tmp_path) == [9, 100]
    prune(tmp_path, 0)
    assert list_saves(tmp_path) == [100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_100", "step_x"]


def test_a_half_deleted_save_never_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_save(tmp_path, step, make_state("fp32"), "fp32", 1)
    events = list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"fsync with {list_saves(tmp_path)}"))

    def die(path: Path, fd: int) -> None:
        assert events == ["fsync with [2]"], "the manifest's end is on disk before anything else goes"
        raise KeyboardInterrupt

    monkeypatch.setattr("megatrain_ray.io.files.owned_folder._delete", die)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert list_saves(tmp_path) == [2]
    assert (save_folder(tmp_path, 1) / "part_0.m").exists()


def made_saves(run: Path, steps: Sequence[int], token: str = "mine") -> Path:
    """Make the saves of a run whose process is dead."""
    for step in steps:
        write_save(run / "saves", step, make_state("fp32"), "fp32", 1, token=token)
        forget_maker(save_folder(run / "saves", step))
    return run / "saves"


def test_only_saves_that_this_run_made_are_pruned(tmp_path: Path) -> None:
    """Not those that were moved away and linked, copied in, or made by an earlier release; they count for nothing."""
    saves, other = made_saves(tmp_path / "run", range(1, 8)), made_saves(tmp_path / "other", [8], "theirs")
    (saves / "step_1").rename(tmp_path / "archived")
    (saves / "step_1").symlink_to(tmp_path / "archived")
    (saves / "step_2" / MARK_NAME).unlink()
    shutil.copytree(saves / "step_4", tmp_path / "copy")
    shutil.rmtree(saves / "step_3")
    (tmp_path / "copy").rename(saves / "step_3")
    (other / "step_8").rename(saves / "step_8")
    prune(saves, 2, "mine")
    assert list_saves(saves) == [1, 2, 3, 6, 7, 8]
    assert (tmp_path / "archived" / "manifest.json").exists()
    reasons = [why_kept(saves, step, "mine") for step in list_saves(saves)]
    expected = ["is a link", "has no mark", "is a copy", None, None, "another run made it"]
    assert all(want is None if why is None else want in why for why, want in zip(reasons, expected, strict=True))


def test_saves_on_another_disk_are_pruned_through_the_link_to_them(tmp_path: Path) -> None:
    made_saves(tmp_path / "other", range(1, 5))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "saves").symlink_to(tmp_path / "other" / "saves")
    prune(tmp_path / "run" / "saves", 2, "mine")
    assert list_saves(tmp_path / "other" / "saves") == [3, 4]
    prune(tmp_path / "run" / "saves", 1, "another run's")
    assert list_saves(tmp_path / "other" / "saves") == [3, 4]


def test_what_has_the_name_of_an_unfinished_save_and_is_none_stays(tmp_path: Path) -> None:
    saves, precious = tmp_path / "run" / "saves", tmp_path / "precious"
    for folder in (saves / "step_1", precious):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (saves / "step_2").symlink_to(precious)
    (saves / "step_3").mkdir()
    (saves / "step_4").symlink_to(tmp_path / "away")  # on a disk that is not mounted
    (saves / "step_5").touch()
    (saves / "step_006").mkdir()  # no name of ours
    assert clean_unfinished(saves, "mine") == []
    assert sorted(path.name for path in saves.iterdir()) == ["step_006", *(f"step_{step}" for step in range(1, 6))]
    links = [(step, f"step_{step} is a link or no folder") for step in (2, 4, 5)]
    for step, reason in ((1, "it has no mark"), *links):
        with pytest.raises(MegatrainError, match=f"the save of step {step} cannot be made: .*{reason}.*move it away"):
            prepare_save(saves, step, "mine")
        abandon_save(saves, step)
    assert (precious / "file").exists() and (saves / "step_1" / "file").exists()
    assert len(in_the_way(saves, "mine")) == 4
    prepare_save(saves, 3, "mine")  # was empty


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_no_number_is_not_saved(tmp_path: Path, itemsize: int, value: float) -> None:
    kind, dtype = ("m", torch.float32) if itemsize == 4 else ("working", torch.bfloat16)
    numbers = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
    numbers[::2] *= -1
    folder = prepare_save(tmp_path, 1)

    def write() -> None:
        piece = Piece("layers.3", kind, 0, 5000, [memoryview(numbers.view(torch.uint8).numpy())])
        asyncio.run(write_part(folder, 0, [piece]))

    write()
    numbers[4321] = value
    with pytest.raises(NonFiniteStateError, match=f"{kind} of layers.3 holds a value that is not finite"):
        write()
