"""What the thread of a mirror does with saves, and what it does if the store fails, without any training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.errors import ConfigError, DamagedSaveError, InterruptedRunError, MegatrainError
from megatrain_ray.io.saves import mirrored_saves
from megatrain_ray.io.saves.save_folder import list_saves, load_manifest, verify
from megatrain_ray.io.storage.object_store import ObjectStore, ObjectStoreError
from megatrain_ray.run import save_mirror
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.save_mirror import NICE, SaveMirror, mirroring
from tests.support.object_server import Bucket, Fault
from tests.support.run_folders import in_folder, refusal, row
from tests.support.saves import make_state, read_save, write_save
from tests.support.settings import config

STATES = {step: make_state("bf16", step) for step in (2, 4, 6)}
BLOBS = {f"part_{part}.{kind}" for part in (0, 1) for kind in ("working", "residual", "m", "v")}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_mirror, "PAUSES_S", (0.0, 0.0))


class Waits(threading.Condition):
    """Counts the waits, and says when one has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.count = threading.Event(), 0

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not predicate():
            self.count += 1
            self.began.set()
        return super().wait_for(predicate, timeout)


@contextmanager
def begun(folder: Path, objects: Bucket, **changes: object) -> Iterator[tuple[RunDir, SaveMirror]]:
    """Open a run and its mirror, and begin it with a save of step 2 if it has none."""
    with RunDir.open(in_folder(folder, save_mirror=f"{objects.url}/run", **changes)) as run, mirroring(run) as mirror:
        assert mirror
        run.begin("{}\n", max(list_saves(run.saves), default=0))
        if not list_saves(run.saves):
            run.append(row(1))
            write_save(run.saves, 2, STATES[2], token=run.token)
        mirror.start()
        yield run, mirror


def saves_of(objects: Bucket) -> dict[int, set[str]]:
    """Return the names of the objects of each save in the mirror."""
    found: dict[int, set[str]] = {}
    for name in objects.names():
        _, folder, *rest = name.split("/")
        if folder == "saves" and rest:
            found.setdefault(int(rest[0].removeprefix("step_")), set()).add(rest[1])
    return found


def test_saves_go_into_the_mirror_and_out_of_it(objects: Bucket, tmp_path: Path) -> None:
    with begun(tmp_path / "a", objects, save_keep=2, save_keep_every=2, save_every=2) as (run, mirror):
        (run.path / "rollouts").mkdir()
        for first in (0, 3):
            (run.path / "rollouts" / f"step_{first}.jsonl").touch()
        write_save(run.saves, 4, STATES[4], token=run.token)
        mirror.saved(4)
    objects.server.requests.clear()
    for file in (run.path / "rollouts").iterdir():
        file.unlink()
    with begun(tmp_path / "a", objects, save_keep=1) as (run, mirror):
        write_save(run.saves, 6, STATES[6], token=run.token)
        mirror.saved(6)
    assert not [request for request in objects.server.requests if request.startswith("GET") and "config" in request]
    assert mirror.lag(7) == 1
    assert saves_of(objects) == {6: {"manifest.json", *BLOBS}}, "2 and 4 as save_keep says"
    assert [name for name in objects.names() if "rollouts" in name] == ["run/rollouts/step_3.jsonl"], "for step 7"
    puts = [request.split(" ")[1].split("?")[0] for request in objects.server.requests if request.startswith("PUT")]
    order = [name.partition("/step_6/")[2] for name in puts if "step_6" in name]
    assert order[-1] == "manifest.json"
    assert set(order[:-1]) == BLOBS
    assert puts.index(f"/{objects.url[5:]}/run/config.yaml") < puts.index(
        f"/{objects.url[5:]}/run/saves/step_6/manifest.json"
    )
    # On another machine: an empty directory goes on from the newest save, and keeps the name of the run.
    with begun(tmp_path / "b", objects) as (moved, mirror):
        assert list_saves(moved.saves) == [6]
        assert read_save(moved.saves, 6) == STATES[6]
        assert moved.token == run.token
        assert moved.rows() == [row(1)]
        assert mirror.lag(6) == 0
        newest = moved.newest_save()
        assert newest
        assert newest.step == 6
    # A start that was killed while it fetched has no config.yaml yet. Rows after the last save are in the mirror, too.
    (tmp_path / "b" / "config.yaml").unlink()
    objects.server.requests.clear()
    with begun(tmp_path / "b", objects) as (moved, mirror):
        assert moved.has_begun
        moved.append(row(7))
    assert not [request for request in objects.server.requests if "part_" in request]
    assert len(objects.get("run/metrics.jsonl").splitlines()) == 2
    # So does a directory whose own saves are older.
    with RunDir.open(in_folder(tmp_path / "a", save_mirror=f"{objects.url}/run")) as run:
        assert list_saves(run.saves) == [2, 4, 6]


def test_faults_are_tried_again_and_not_for_ever(
    objects: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = objects.server.faults
    faults["PUT .*residual"] = [Fault.ERROR, Fault.SLOW_DOWN, Fault.DENIED, Fault.CUT, Fault.DEAD]
    faults["PUT .*step_2/manifest"] = [Fault.DENIED] * 2
    with begun(tmp_path / "a", objects):
        pass
    assert [pattern for pattern, left in faults.items() if left] == []
    assert saves_of(objects) == {2: {"manifest.json", *BLOBS}}
    faults["PUT .*step_4/part_0.v"] = [Fault.DENIED] * 99
    with (
        pytest.raises(MegatrainError, match=r"the newest save is not in .*part_0\.v.*the same command uploads it"),
        begun(tmp_path / "a", objects) as (run, mirror),
    ):
        write_save(run.saves, 4, STATES[4], token=run.token)
        mirror.saved(4)
    assert len(faults["PUT .*step_4/part_0.v"]) in (93, 96), "three tries, and again at the end"
    assert "manifest.json" not in saves_of(objects)[4]
    with pytest.raises(InterruptedRunError, match="stopped"), begun(tmp_path / "a", objects):
        raise InterruptedRunError("stopped")
    assert "warning: save_mirror: the newest save is not in" in capsys.readouterr().err
    faults.clear()
    with begun(tmp_path / "a", objects) as (_, mirror):
        pass
    assert sorted(saves_of(objects)) == [2, 4]

    def fail() -> None:
        raise ObjectStoreError("cannot write s3://x")

    with pytest.raises(save_mirror._StoppedError):  # at the end of the block above
        mirror._retried(fail)
    assert mirror._progress() == "an upload is tried again: cannot write s3://x"
    mirror._retried(lambda: None)
    assert mirror._progress() == "the last rows are sent"


def test_a_manifest_vouches_for_nothing_that_the_store_has_lost(
    objects: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed before the last blob of step 4. One that is empty takes its place."""
    monkeypatch.setattr(mirrored_saves, "BLOBS_AT_ONCE", 1)

    def die() -> None:
        objects.server.kill()
        objects.restart_server({})

    with begun(tmp_path / "a", objects):
        pass
    objects.server.calls["POST .*step_4/part_1.v"] = die
    with begun(tmp_path / "a", objects) as (run, mirror):
        write_save(run.saves, 4, STATES[4], token=run.token)
        mirror.saved(4)
    assert objects.server.calls == {}
    assert mirror.lag(4) == 0
    assert saves_of(objects) == {4: {"manifest.json", *BLOBS}}
    with begun(tmp_path / "b", objects) as (moved, _):
        assert read_save(moved.saves, 4) == STATES[4]
        assert moved.rows() == [row(1)]
    # A store that lists late is asked for each blob by name.
    store, manifest = ObjectStore(StoreUrl.parse(f"{objects.url}/run")), load_manifest(moved.saves, 4)
    assert mirrored_saves.missing_blobs(store, [], manifest) == []
    objects.delete("run/saves/step_4/part_1.m")
    assert [blob.name for blob in mirrored_saves.missing_blobs(store, [], manifest)] == ["part_1.m"]


def test_a_slow_store_holds_up_nobody(objects: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While the save of step 2 hangs in the store, 4 and 6 are made; then the newest goes up, and 4 never does."""
    reached, released = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        assert released.wait(60)

    objects.server.calls["PUT .*step_2/part_0.m"] = hang
    with begun(tmp_path / "a", objects, save_keep=1) as (run, mirror):
        assert reached.wait(60)
        mirror.saved(2)  # its upload began as soon as it was there
        for step in (4, 6):
            write_save(run.saves, step, STATES[step], token=run.token)
            mirror.saved(step)
        assert mirror.uploading == 2
        assert mirror.lag(6) == 6
        (uploader,) = (thread for thread in threading.enumerate() if thread.name == "save mirror")
        assert uploader.native_id
        assert os.getpriority(os.PRIO_PROCESS, uploader.native_id) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        released.set()
    assert sorted(saves_of(objects)) == [6]
    late = [line for line in capsys.readouterr().err.splitlines() if "the mirror lags behind" in line]
    assert len(late) == 1
    assert "save_mirror: the save of step 4 is made, and " in late[0]
    assert not [request for request in objects.server.requests if "step_4" in request]


def test_an_upload_waits_for_one_save_that_is_written_meanwhile(
    objects: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload of step 4 waits until 6 is written, and not for 8. That of 6 waits for 8 until the run is killed."""
    monkeypatch.setattr(mirrored_saves, "BLOBS_AT_ONCE", 1)

    with begun(tmp_path / "a", objects):
        pass
    with pytest.raises(KeyboardInterrupt), begun(tmp_path / "a", objects, save_keep=3) as (run, mirror):
        waits = Waits()
        monkeypatch.setattr(mirror, "_writes", waits)
        mirror.writing(6)
        write_save(run.saves, 4, STATES[4], token=run.token)
        mirror.saved(4)
        assert waits.began.wait(60)
        assert 4 not in saves_of(objects)
        waits.began.clear()
        write_save(run.saves, 6, STATES[6], token=run.token)
        mirror.writing(None)
        mirror.writing(8)
        mirror.saved(6)
        assert waits.began.wait(60)
        assert mirror.lag(6) == 2
        raise KeyboardInterrupt
    assert not mirror._thread.is_alive()
    assert waits.count == 2
    assert saves_of(objects)[4] == {"manifest.json", *BLOBS}
    assert "manifest.json" not in saves_of(objects).get(6, set())


def test_a_damaged_save_of_the_mirror_is_passed_over(objects: Bucket, tmp_path: Path) -> None:
    with begun(tmp_path / "a", objects) as (run, mirror):
        write_save(run.saves, 4, STATES[4], token=run.token)
        mirror.saved(4)
    blob = bytearray(objects.get("run/saves/step_4/part_0.m"))
    blob[100] ^= 1
    objects.put(**{"run/saves/step_4/part_0.m": bytes(blob)})
    wanted = in_folder(tmp_path / "b", save_mirror=f"{objects.url}/run")
    with RunDir.open(wanted) as run:
        assert list_saves(run.saves) == [2]
        assert verify(run.saves / "step_2") == []
    objects.delete("run/saves/step_2/part_1.v")
    with (
        pytest.raises(DamagedSaveError, match=r"step_2/part_1\.v: expected \d+ bytes, it is missing"),
        RunDir.open(wanted.model_copy(update={"run_dir": str(tmp_path / "c")})),
    ):
        pytest.fail("opened")
    assert list_saves(tmp_path / "c" / "saves") == []


def test_places_that_are_not_this_runs_are_refused(objects: Bucket, tmp_path: Path) -> None:
    with begun(tmp_path / "a", objects):
        pass
    mirror = f"{objects.url}/run"
    for name, step in (("older", 1), ("as new", 2)):
        with RunDir.open(in_folder(tmp_path / name)) as run:
            run.begin("{}\n", 0)
            write_save(run.saves, step, STATES[2], token=run.token)
        with (
            pytest.raises(ConfigError, match="is the mirror of another run"),
            begun(tmp_path / name, objects),
        ):
            pytest.fail("mirrored")
    assert "resume is false, but" in refusal(in_folder(tmp_path / "c", save_mirror=mirror, resume=False))
    other = refusal(in_folder(tmp_path / "c", save_mirror=mirror, data__path="other"))
    assert other.startswith(f"{mirror} holds a run with other settings")
    assert not (tmp_path / "c").exists()
    objects.put(**{"full/x": b""})
    with (
        pytest.raises(ConfigError, match="holds x, and no mirror of a run"),
        RunDir.open(in_folder(tmp_path / "c", save_mirror=f"{objects.url}/full")) as run,
        mirroring(run),
    ):
        pytest.fail("mirrored")
    with pytest.raises(ConfigError, match="run_dir: it is a URL; name a folder of this machine; save_mirror copies"):
        config(run_dir="s3://bucket/run")
    with pytest.raises(ConfigError, match="save_mirror: expected a URL such as s3://BUCKET/PATH, got 'folder'"):
        in_folder(tmp_path / "c", save_mirror="folder")
