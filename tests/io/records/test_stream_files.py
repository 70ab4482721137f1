"""Files of a stream: how they are listed, divided and fetched, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain_ray.config.values import HubDataset
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.records import stream_files
from megatrain_ray.io.records.stream_files import StreamFile, divide, fetch, list_files, listing_of
from tests.io.records.test_hub_datasets import online
from tests.support.fake_hub import COMMIT, serve
from tests.support.object_server import Bucket, Fault

SUFFIXES = (".jsonl", ".txt", ".arrow")


def test_consecutive_files_are_joined_up_to_a_size() -> None:
    files = [StreamFile(None, f"/{number}", nbytes, 0) for number, nbytes in enumerate((3, 3, 5, 12, 1, 9, 2))]
    assert [[file.nbytes for file in portion] for portion in divide(files, 10)] == [[3, 3], [5], [12], [1, 9], [2]]
    assert [len(portion) for portion in divide(files, 1)] == [1] * 7
    first = listing_of(divide(files, 10))
    assert first == listing_of(divide(files, 10))
    assert (first["files"], first["bytes"]) == (7, 35)
    assert first["digest"] != listing_of(divide(files, 11))["digest"], "portions of other files"
    moved = [file._replace(name=f"/elsewhere{file.name}") for file in files]
    assert listing_of(divide(moved, 10)) == first
    moved[0] = moved[0]._replace(modified_ns=1)
    assert listing_of(divide(moved, 10)) != first


def test_files_of_a_store_are_fetched_as_they_were_listed(
    objects: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(stream_files.time, "sleep", waited.append)
    objects.put(**{"x/b.jsonl": b"two\n", "x/a.jsonl": b"one\n", "x/empty.jsonl": b"", "x/image.png": b"png"})
    local = tmp_path / "local.txt"
    local.write_text("local")
    files = list_files([f"{objects.url}/x", local.as_uri(), str(local)], SUFFIXES)
    assert [(Path(file.name).name, file.nbytes) for file in files] == [
        ("a.jsonl", 4), ("b.jsonl", 4), ("local.txt", 5), ("local.txt", 5)
    ]  # fmt: skip
    assert not any(request.startswith("GET") and ".jsonl" in request for request in objects.server.requests)
    lines: list[str] = []
    assert fetch(files[3], tmp_path, lines.append) == local
    objects.server.faults[r"^GET .*a\.jsonl"] = [Fault.DENIED]
    assert fetch(files[0], tmp_path, lines.append).read_bytes() == b"one\n"
    assert str(files[0]) == f"{objects.url}/x/a.jsonl"
    assert (len(lines), waited) == (1, [1.0])
    assert lines[0].startswith(f"{files[0]} is fetched again in 1 s: cannot read {files[0]}: ")
    objects.put(**{"x/b.jsonl": b"another\n"})
    with pytest.raises(MegatrainError, match=r"b\.jsonl has changed since .*: 4 bytes then, 8 bytes now"):
        fetch(files[1], tmp_path, lines.append)
    objects.server.faults[r"^GET .*a\.jsonl"] = [Fault.DENIED] * 3
    with pytest.raises(MegatrainError, match=r"a\.jsonl cannot be fetched, after 3 tries: cannot read "):
        fetch(files[0], tmp_path, lines.append, (2.0, 3.0))
    assert waited == [1.0, 2.0, 3.0]
    os.utime(local, ns=(1, 1))
    with pytest.raises(MegatrainError, match=r"local\.txt has changed since .*: 5 bytes then, 5 bytes now, or another"):
        fetch(files[3], tmp_path, lines.append)
    local.unlink()
    with pytest.raises(MegatrainError, match=r"local\.txt has changed since .*: 5 bytes then, it is gone now"):
        fetch(files[3], tmp_path, lines.append)
    single = list_files([f"{objects.url}/x/a.jsonl"], SUFFIXES)[0]
    assert fetch(single, tmp_path, lines.append).name == "a.jsonl"
    objects.put(**{"y/empty.jsonl": b"", "z/data.arrow": b"a", "z/state.json": b"{}"})
    with pytest.raises(ConfigError, match=r"all files of .*/y are empty"):
        list_files([f"{objects.url}/y"], SUFFIXES)
    with pytest.raises(ConfigError, match=r"a folder of the datasets library is read whole only: .*/z/\*\.arrow"):
        list_files([f"{objects.url}/z"], SUFFIXES)


def test_files_of_the_hub_go_past_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"train-0.jsonl": b'{"text": "a"}\n', "train-1.jsonl": b'{"text": "bc"}\n', "test.jsonl": b"{}\n"}
    with serve({"datasets/owner/texts": texts}) as hub:
        online(monkeypatch, hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        files = list_files([HubDataset(hub="owner/texts", commit=COMMIT)], SUFFIXES)
        assert [(file.name, file.nbytes) for file in files] == [("train-0.jsonl", 14), ("train-1.jsonl", 15)]
        found = fetch(files[1], tmp_path / "own", print)
        assert found.read_bytes() == texts["train-1.jsonl"]
        assert found.is_relative_to(tmp_path / "own")
        assert not any((tmp_path / "hub").rglob("*.jsonl"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match="the hub cannot be reached, and a stream does not read its cache"):
            list_files([HubDataset(hub="owner/texts", commit=COMMIT)], SUFFIXES)
        hub.wait_closed()
