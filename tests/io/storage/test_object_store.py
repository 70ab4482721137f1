"""What every library behind a URL must do: Arrow's own file systems and adapters of fsspec."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.io.storage.object_store import CHUNK_BYTES, ObjectStore, ObjectStoreError
from tests.support.object_server import Bucket, Fault

SIZES = {"empty": 0, "a/one": 1, "a/b c/larger.gz": CHUNK_BYTES + 1}


@pytest.mark.parametrize("scheme", ["s3", "file", "memory"])
def test_objects_are_written_found_read_and_deleted(scheme: str, objects: Bucket, tmp_path: Path) -> None:
    places = {"s3": f"{objects.url}/x", "file": f"file://{tmp_path}/new/x", "memory": "memory://bucket/x"}
    store = ObjectStore(StoreUrl.parse(places[scheme]))
    assert store.find() == []
    assert store.stat("a/one") is None
    source, back, seen = tmp_path / "source", tmp_path / "back", list[int]()
    for name, size in SIZES.items():
        source.write_bytes(bytes(range(251)) * (size // 251 + 1) if size else b"")
        with source.open("r+b") as file:
            file.truncate(size)
        store.upload(source, name, seen.append)
        found = store.stat(name)
        assert found
        assert found.nbytes == size
        store.download(found, back)
        assert back.read_bytes() == source.read_bytes()
    assert seen == [1, CHUNK_BYTES, CHUNK_BYTES + 1]
    assert {item.name: item.nbytes for item in store.find()} == SIZES
    (itself,) = ObjectStore(StoreUrl.parse(f"{places[scheme]}/a/one")).find()
    assert (itself.name, itself.nbytes) == ("", 1)
    stale = store.stat("a/one")
    store.write("a/one", b"xy")
    assert store.read("a/one") == b"xy"
    assert stale
    with pytest.raises(ObjectStoreError, match="a/one changed while it was read: 2 of 1 bytes"):
        store.download(stale, back)
    for _ in range(2):  # an answer may have been lost
        store.delete("a/one")
        store.delete_folder("a/b c")
    assert [item.name for item in store.find()] == ["empty"]


def test_what_a_library_raises_names_the_object(objects: Bucket) -> None:
    store = ObjectStore(StoreUrl.parse(f"{objects.url}/x"))
    objects.server.faults["PUT .*x/y"] = [Fault.DENIED]
    with pytest.raises(ObjectStoreError, match=rf"cannot write {objects.url}/x/y: .*403"):
        store.write("y", b"content")
    with pytest.raises(ObjectStoreError, match=rf"cannot read {objects.url}/x/y: "):
        store.read("y")


@pytest.mark.parametrize(("query", "limit_s"), [("", 30), ("?retry_limit_seconds=5", 5)])
def test_requests_to_google_are_tried_again_for_half_a_minute(query: str, limit_s: int) -> None:
    store = ObjectStore(StoreUrl.parse(f"gs://anonymous@bucket/x{query}"))
    settings = store._files.__reduce__()[1][0]  # what a copy in another process is made of
    assert settings["retry_time_limit"] == timedelta(seconds=limit_s)


def test_a_container_may_stand_in_the_path() -> None:
    """As where an account of Azure has an address of its own: its container is no host."""
    assert ObjectStore(StoreUrl.parse("abfs://account@127.0.0.1:10000/container/x"))._root == "container/x"


class Remembering(MemoryFileSystem):
    """Answers with its first listing until it is told to forget it."""

    protocol = "remembering"
    cachable = False

    def find(self, path: str, **options: Any) -> Any:
        if not hasattr(self, "listing"):
            self.listing = super().find(path, **options)
        return self.listing

    def invalidate_cache(self, path: str | None = None) -> None:
        vars(self).pop("listing", None)


def test_an_adapter_that_remembers_listings_is_asked_anew() -> None:
    register_implementation("remembering", Remembering, clobber=True)
    store = ObjectStore(StoreUrl.parse("remembering://anew"))
    for count in range(3):
        assert len(store.find()) == count
        store.write(f"{count}", b"x")
