"""Sources of data in an object store: which objects are read, when they are fetched, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain_ray.config.values import sources_of_data
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.find_files import find_files
from megatrain_ray.io.records.remote_sources import TRIES, local_copy
from tests.support.object_server import Bucket, Fault

LINE = b'{"text": "a"}\n'


def found(source: str, root: Path, lines: list[str] | None = None) -> list[str]:
    """Return the files that are read of a URL, below the copy of its bucket."""
    path = local_copy(source, root, (lines if lines is not None else []).append)
    return [str(Path(*file.relative_to(root).parts[2:])) for file in find_files(path)]


def test_a_copy_means_what_the_url_means(objects: Bucket, tmp_path: Path) -> None:
    names = ["a b/ü.jsonl", "a b/c/d.jsonl.gz", "a b/c/e.txt", "a b/.hidden/f.txt", "a b/image.png", "other.parquet"]
    objects.put(**dict.fromkeys(names, LINE))
    for path, expected in {
        "/a b": ["a b/c/d.jsonl.gz", "a b/c/e.txt", "a b/ü.jsonl"],
        "/a b/c/e.txt": ["a b/c/e.txt"],
        "/a b/*": ["a b/c/d.jsonl.gz", "a b/c/e.txt", "a b/ü.jsonl"],
        "/a b/*.jsonl": ["a b/ü.jsonl"],
        "/**/[d-f].*": ["a b/c/d.jsonl.gz", "a b/c/e.txt"],
        "/a b/**/*.jsonl": ["a b/ü.jsonl"],
    }.items():
        root = tmp_path / path.replace("/", "_")  # its own [ and * mean nothing
        assert found(objects.url + path, root) == expected, path
    fetched = [request for request in objects.server.requests if request.startswith("GET") and "png" in request]
    assert fetched == []
    objects.put(**{"chats/dataset_info.json": b"{}", "chats/data/a.jsonl": LINE})
    info = Path(local_copy(f"{objects.url}/chats/dataset_info.json", tmp_path, print))
    assert (info.read_bytes(), (info.parent / "data" / "a.jsonl").read_bytes()) == (b"{}", LINE)
    with pytest.raises(ConfigError, match=r"image\.png is of no known format \(\.png\)"):
        found(f"{objects.url}/a b/image.png", tmp_path)
    missing = "no such file, and no folder or glob with files of a known format"
    for url, problem in {
        f"{objects.url}/a b/no.jsonl": missing,
        f"{objects.url}/no": missing,
        f"{objects.url}/a b/*.csv": missing,
        "s3://no-such-bucket/a/*.txt": "the store has no bucket no-such-bucket; check its name, and which",
    }.items():
        with pytest.raises(ConfigError) as refused:
            found(url, tmp_path)
        assert str(refused.value).startswith(f"data.path: {url}: {problem}")


def test_only_what_has_changed_is_fetched_again(objects: Bucket, tmp_path: Path) -> None:
    objects.put(**{"x/a.txt": b"one", "x/b.txt": b"two", "x/c.txt": b"three"})
    lines: list[str] = []
    assert found(f"{objects.url}/x", tmp_path, lines) == ["x/a.txt", "x/b.txt", "x/c.txt"]
    folder = tmp_path / "s3" / objects.url.removeprefix("s3://") / "x"
    assert lines == [f"fetching 3 files (11 B) of {objects.url}/x into {folder}"]
    before = (folder / "a.txt").stat()
    objects.put(**{"x/b.txt": b"another"})
    objects.delete("x/c.txt")
    (folder / f".b.txt.{'0' * 8}.new").write_bytes(b"left by a kill")
    os.utime(folder / f".b.txt.{'0' * 8}.new", (0, 0))
    objects.server.requests.clear()
    assert found(f"{objects.url}/x", tmp_path, lines) == ["x/a.txt", "x/b.txt"]
    assert (folder / "b.txt").read_bytes() == b"another"
    assert (folder / "a.txt").stat() == before  # what tokens are found by
    assert sorted(file.name for file in folder.iterdir()) == ["a.txt", "b.txt"]
    assert not [request for request in objects.server.requests if "a.txt" in request]
    assert found(f"{objects.url}/x", tmp_path, lines) == ["x/a.txt", "x/b.txt"]
    assert len(lines) == 2


def test_a_file_that_cannot_be_fetched_leaves_nothing(objects: Bucket, tmp_path: Path) -> None:
    objects.put(**{"x/a.txt": b"a" * 100_000})
    faults = objects.server.faults["GET .*a.txt"] = [Fault.ERROR, Fault.SLOW_DOWN, Fault.CUT]
    assert found(f"{objects.url}/x", tmp_path / "lasting") == ["x/a.txt"]
    assert faults == []
    faults += [Fault.DENIED] * TRIES
    with pytest.raises(ConfigError, match=f"data.path: cannot read {objects.url}/x/a.txt: "):
        found(f"{objects.url}/x", tmp_path / "broken")
    assert [file for file in (tmp_path / "broken").rglob("*") if file.is_file()] == []
    assert faults == []


def test_names_that_lead_out_of_the_copy_are_left_out(objects: Bucket, tmp_path: Path) -> None:
    objects.put(**{"x/../../../../../out.txt": LINE, "x//out.txt": LINE, "x/in.txt": LINE})
    assert found(f"{objects.url}/x", tmp_path / "copies") == ["x/in.txt"]
    assert [file.name for file in tmp_path.rglob("*.txt")] == ["in.txt"]
    with pytest.raises(ConfigError, match=r"holds \.\.; name the path that is meant"):
        found(f"{objects.url}/../x", tmp_path)


def test_any_adapter_of_fsspec_is_read(tmp_path: Path) -> None:
    """This one tells no time of change: files are fetched at each start, and stay as they were if they are equal."""
    from fsspec.implementations.memory import MemoryFileSystem

    files = MemoryFileSystem()
    with pytest.raises(ConfigError, match="the store has no bucket corpus; check"):
        found("memory://corpus/x", tmp_path)
    files.pipe("/corpus/x/a.txt", b"one")
    assert found("memory://corpus/x", tmp_path) == ["x/a.txt"]
    copy = tmp_path / "memory" / "corpus" / "x" / "a.txt"
    before = copy.stat()
    assert found("memory://corpus/x", tmp_path) == ["x/a.txt"]
    assert copy.stat() == before
    files.pipe("/corpus/x/a.txt", b"two")
    assert found("memory://corpus/x", tmp_path) == ["x/a.txt"]
    assert copy.read_bytes() == b"two"
    with pytest.raises(ConfigError, match=r"data\.path: cannot open nothing://a"):
        found("nothing://a/b", tmp_path)
    assert local_copy(f"file://{copy}", tmp_path, print) == str(copy)
    with pytest.raises(ConfigError, match=r"file://a/b.txt names the machine a; a local file is file:///PATH"):
        local_copy("file://a/b.txt", tmp_path, print)


@pytest.mark.parametrize(
    "url", ["s3://me:pass1@bucket/x", "https://host/x?X-Amz-Signature=pass1", "abfs://b@c/x?sas_token=pass1"]
)
def test_secrets_in_a_url_are_refused_unseen(url: str) -> None:
    with pytest.raises(ValueError, match="holds a password or a key") as refused:
        sources_of_data([{"path": url, "weight": 1}])
    assert "pass1" not in str(refused.value)
    assert sources_of_data("abfs://container@account.dfs.core.windows.net/x?tenant_id=1")
