"""Data sets by their hub id: which files they are, at which commit, and what is said when they cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain_ray.config.values import HubDataset
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records import hub_datasets
from megatrain_ray.io.records.hub_datasets import CONVERTED, cached_files, fetch, find_commit, short_form
from tests.support.fake_hub import COMMIT, Hub, commit_of, serve

CARD = b"""---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: "en/train-*.parquet"}
  - {split: train_sft, path: ["en/sft.jsonl", "en/more/**"]}
- config_name: de
  data_dir: de
---
# A data set
"""
DESCRIBED = dict.fromkeys(
    ["en/train-1.parquet", "en/train-0.parquet", "en/sft.jsonl", "en/more/deep/a.jsonl", "de/test.csv", "de/train.csv"],
    b"",
)
SEVERAL = b"---\nconfigs:\n- {config_name: a, data_files: a.csv}\n- {config_name: b, data_files: b.csv}\n---\n"
REPOSITORIES = {
    "datasets/o/described": dict.fromkeys(DESCRIBED, b"") | {"README.md": CARD},
    "datasets/o/several": {"README.md": SEVERAL, "a.csv": b"", "b.csv": b""},
    "datasets/o/named": dict.fromkeys(
        ["data/train-00000-of-00001.parquet", "data/validation.parquet", "notes.txt"], b""
    ),
    "datasets/o/plain": dict.fromkeys(["b.jsonl", "a.jsonl", "LICENSE.txt", "dataset_infos.json"], b"x"),
    "datasets/o/script": dict.fromkeys(["script.py", "raw.jsonl"], b""),
    f"datasets/o/script@{CONVERTED}": dict.fromkeys(["default/train/0001.parquet", "default/train/0000.parquet"], b""),
    "datasets/o/folders": dict.fromkeys(["test_data/train.csv", "test_data/b.csv", "valid/c.csv", "d.csv"], b""),
    "datasets/o/uploaded": {f"data/{split}-00000-of-00001-a1.csv": b"" for split in ("train_sft", "train_gen")},
    "datasets/o/renamed": {
        "README.md": b"---\nconfigs:\n- {config_name: a, data_files: gone.csv}\n---\n",
        "a.csv": b"",
    },
    "datasets/o/other": {"images.zip": b""},
    "datasets/o/gated": None,
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve(REPOSITORIES) as served:
        yield served


@pytest.fixture(autouse=True)
def at_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send this process to the server on this machine, with an empty cache."""
    online(monkeypatch, hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield
    hub.wait_closed()


def online(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", url == "")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub_datasets._repository.cache_clear()


def files(hub: str, **settings: str) -> list[str]:
    found = find_commit(HubDataset(hub=hub, **settings))
    return [str(file).partition(f"/snapshots/{found.commit}/")[2] for file in fetch(found)]


def test_files_are_those_of_the_configuration_and_split() -> None:
    assert files("o/described") == ["en/train-0.parquet", "en/train-1.parquet"]
    assert files("o/described", name="en", split="train_sft") == ["en/more/deep/a.jsonl", "en/sft.jsonl"]
    assert files("o/described", name="de") == ["de/train.csv"]
    assert files("o/several", name="b") == ["b.csv"]
    assert files("o/named", split="validation") == ["data/validation.parquet"]
    assert files("o/uploaded", split="train_sft") == ["data/train_sft-00000-of-00001-a1.csv"]
    assert files("o/folders") == ["test_data/train.csv"]
    assert files("o/folders", split="test") == ["test_data/b.csv"]
    assert files("o/folders", split="validation") == ["valid/c.csv"]
    assert files("o/plain", revision="main") == ["a.jsonl", "b.jsonl"]
    assert files("o/script") == ["default/train/0000.parquet", "default/train/0001.parquet"]
    assert find_commit(HubDataset(hub="o/script")).commit == commit_of(CONVERTED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hub": "o/several"}, r"has several configurations \(a, b\); name one: {hub: o/several, name: a}"),
        ({"hub": "o/described", "name": "fr"}, "has no configuration 'fr'; it has en, de"),
        (
            {"hub": "o/described", "split": "test"},
            "has no split 'test'; set split to one of train, train_sft",
        ),
        ({"hub": "o/other"}, "holds no data files of a known format, and the hub has not converted it"),
        ({"hub": "o/absent"}, "no such repository on the hub, or a private one: `hf auth login`"),
        ({"hub": "o/plain", "revision": "dev"}, "the hub has this repository, but not in this revision"),
        ({"hub": "o/gated"}, "the hub asks for its terms to be accepted there first, and for `hf auth login`"),
    ],
)
def test_what_cannot_be_read_is_said(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_commit(HubDataset(**settings))


def test_a_readme_that_names_no_file_that_is_there() -> None:
    with pytest.raises(ConfigError, match=r"o/renamed \(a\): no data file has a name that its README.md gives"):
        files("o/renamed")


def test_what_is_read_of_a_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = files("o/plain")
    assert cached_files(find_commit(HubDataset(hub="o/plain"))) == ()
    online(monkeypatch, "")
    assert list(cached_files(find_commit(HubDataset(hub="o/plain")))) == names


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1"], ids=["offline", "unreachable"])
def test_without_a_network_the_cache_is_read(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    fetched = {name: files(name) for name in ("o/named", "o/script", "o/described")}
    pinned = find_commit(HubDataset(hub="o/described"))
    online(monkeypatch, url)
    assert {name: files(name) for name in fetched} == fetched
    assert [file.name for file in fetch(pinned)] == ["train-0.parquet", "train-1.parquet"]
    with pytest.raises(ConfigError, match="has no split 'test' in the hub's cache, and the hub cannot be reached"):
        files("o/named", split="test")
    with pytest.raises(ConfigError) as caught:
        files("o/plain")
    assert str(caught.value) == (
        f"data.path: o/plain: no such folder (relative paths start at {Path.cwd()}), and it is not in the hub's cache, "
        "while the hub cannot be reached: give a local folder, or run `hf download --repo-type dataset o/plain` with a "
        "network"
    )


def test_a_part_of_the_files_in_the_cache_is_not_taken_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot := tmp_path / "hub" / "datasets--o--big" / "snapshots" / COMMIT).mkdir(parents=True)
    (snapshot / "train-00001-of-00003-ab12.parquet").touch()
    online(monkeypatch, "")
    with pytest.raises(ConfigError, match="its cache has 1 of 3 files of train: run `hf download"):
        fetch(HubDataset(hub="o/big", commit=COMMIT))


def test_a_path_is_a_data_set_only_if_nothing_local_can_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    assert short_form("owner/name@v1.0") == HubDataset(hub="owner/name", revision="v1.0")
    for path in ("corpus/books", "corpus", "data/chats.jsonl", "a/b/c", "/a/b", "owner/*", "name"):
        assert short_form(path) is None, path
