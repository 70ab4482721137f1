"""Whole runs whose saves are mirrored: killed between blobs and manifest, gone on with elsewhere, and exported."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.run import save_mirror
from megatrain_ray.run.save_mirror import SaveMirror
from tests.support.in_process import Train
from tests.support.object_server import CREDENTIALS, Bucket
from tests.support.runs import ROOT, cli_here, command, config, losses, rows, write_config
from tests.support.tiny import build_tiny


def written(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_goes_on_from_its_mirror(
    tmp_path: Path, train: Train, objects: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 4 are mirrored; the server is killed in the upload of step 2, and started again when step 4 is saved.

    It is killed again in the upload of step 6, and stays away until the run has ended. With the next server, that save
    is uploaded by a process that is killed before its manifest. So the mirror has the save of step 4, from which
    another directory goes on to the losses that the first one has.
    """
    changes: dict[str, Any] = {"save_every": 2, "save_keep": 1, "train__schedule": "constant"}
    tree = config(tmp_path / "first", build_tiny(tmp_path / "model"), **changes)
    path = str(write_config(tmp_path / "config.yaml", tree))
    url = f"{objects.url}/runs/one"
    six_steps = path, "train.steps=6", f"save_mirror={url}"
    dead, restart = _server_dies(objects, r"PUT .*step_2/part_0\.m")
    mirror_saved, written_steps = SaveMirror.saved, _written_steps(monkeypatch)

    def saved(mirror: SaveMirror, step: int) -> None:
        mirror_saved(mirror, step)
        assert dead.wait(60), "the upload of step 2 is under way"
        if step == 4:
            restart()

    monkeypatch.setattr(SaveMirror, "saved", saved)
    done = train(*six_steps, "train.steps=4")
    assert done.returncode == 0, done.stderr
    assert [row["mirror_lag"] for row in rows(tmp_path / "first")] == [1, 2, 3, 4], "no step waits for the mirror"
    assert written_steps[:4] == [2, None, 4, None], "uploads wait from the beginning of a save to its commit"
    assert "save_mirror: the save of step 4 is made, and " in done.stderr
    puts = [request for request in objects.server.requests if request.startswith("PUT") and "manifest.json" in request]
    assert [re.findall(r"step_\d", name) for name in puts] == [["step_2"], ["step_4"]], "save_keep: 1 waits for uploads"
    assert train(path, "train.steps=6").returncode == 0

    _, restart = _server_dies(objects, r"PUT .*step_6/part_0\.m")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_mirror, "PAUSES_S", ())
        failed = train(*six_steps)
    assert failed.returncode == 1
    assert f"save_mirror: the newest save is not in {url}: cannot write {url}/saves/step_6/part_0." in failed.stderr
    assert f"{tmp_path}/first/saves has it, and the same command uploads it" in failed.stderr
    restart()

    process = subprocess.Popen(command("train", *six_steps), cwd=ROOT, stderr=subprocess.PIPE, env=os.environ)
    objects.server.calls[r"PUT .*step_6/manifest\.json"] = lambda: os.kill(process.pid, signal.SIGKILL)
    assert process.communicate(timeout=120)[1] is not None
    assert process.returncode == -signal.SIGKILL
    names = objects.names()
    assert "runs/one/saves/step_6/part_0.m" in names
    assert "runs/one/saves/step_4/manifest.json" in names

    resumed = train(*six_steps, f"run_dir={tmp_path / 'second'}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"fetching the save of step 4 (2.02 MiB) from {url}" in resumed.stderr
    assert "resuming from the save of step 4" in resumed.stderr
    assert losses(tmp_path / "second") == losses(tmp_path / "first")
    saves = {name.split("/")[3] for name in objects.names() if "/saves/" in name}
    assert saves == {"step_6"}
    _is_exported(tmp_path, objects, url)

    shutil.rmtree(tmp_path / "model")
    everything = b"".join([*written(tmp_path).values(), *(objects.get(name) for name in objects.names())])
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in everything


def _written_steps(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return a list that receives what mirrors are told of saves that are being written."""
    steps, writing = list[int | None](), SaveMirror.writing

    def note(mirror: SaveMirror, step: int | None) -> None:
        steps.append(step)
        writing(mirror, step)

    monkeypatch.setattr(SaveMirror, "writing", note)
    return steps


def _server_dies(objects: Bucket, request: str) -> tuple[threading.Event, Callable[[], None]]:
    """Kill the server when it is asked something. Return what is set then, and what starts one with its objects."""
    confirmed, dead = dict[str, bytes](), threading.Event()

    def die() -> None:
        confirmed.update({name: objects.get(name) for name in objects.names()})
        objects.server.kill()
        dead.set()

    objects.server.calls[request] = die
    return dead, lambda: objects.restart_server(confirmed)


def _is_exported(folder: Path, objects: Bucket, url: str) -> None:
    """Export from the mirror and from the run, and to the store: the same files, and no moments fetched."""
    for where, out in ((url, "of_mirror"), (str(folder / "second"), "of_run")):
        exported = cli_here("export", where, str(folder / out))
        assert exported.returncode == 0, exported.stderr
    assert written(folder / "of_mirror") == written(folder / "of_run")
    fetched = [request for request in objects.server.requests if request.startswith("GET") and "/step_6/" in request]
    assert not [request for request in fetched if request.endswith((".m", ".v"))]

    uploaded = cli_here("export", str(folder / "second"), f"{objects.url}/model")
    assert uploaded.returncode == 0, uploaded.stderr
    assert uploaded.stdout.startswith(f"exported the save of step 6 to {objects.url}/model: ")
    of_store = {name.removeprefix("model/"): objects.get(name) for name in objects.names() if name.startswith("model/")}
    assert of_store == written(folder / "of_run")
    again = cli_here("export", str(folder / "second"), f"{objects.url}/model")
    assert again.returncode == 2
    assert f"OUT_DIR: {objects.url}/model holds config.json: nothing is overwritten" in again.stderr
    missing = cli_here("export", f"{objects.url}/nothing", str(folder / "no"))
    assert missing.returncode == 2
    assert f"{objects.url}/nothing is no mirror of a run: it holds no config.yaml" in missing.stderr
