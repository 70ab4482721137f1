"""Lists the files of a source that is read as a stream, divides them into portions, and fetches one at a time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_ray.config.urls import StoreUrl, is_url
from megatrain_ray.config.values import HubDataset
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.checkpoints import hub
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.records.find_files import METADATA, find_files
from megatrain_ray.io.records.hub_datasets import TIMEOUT_S, file_names
from megatrain_ray.io.records.remote_sources import find_objects, local_path
from megatrain_ray.io.storage.object_store import ObjectStore, ObjectStoreError, StoredObject

# A run goes on with what it has meanwhile. A guess: most failures of a store or of the hub are over by then.
RETRY_WAITS_S = (1.0, 10.0, 60.0, 300.0)
FEW_WAITS_S = RETRY_WAITS_S[:2]  # at the start of a run, where somebody may wait


class StreamFile(NamedTuple):
    """Describes a file as it was when the run began; what differs later is not read.

    origin: URL of the folder or file in an object store; or a data set of the hub at a commit; None: a local file.
    name: below `origin`, empty if that is the file; of a local file its path.
    modified_ns: time of its last change since 1970; None: the commit tells, or nothing does.
    """

    origin: str | HubDataset | None
    name: str
    nbytes: int
    modified_ns: int | None

    def __str__(self) -> str:
        if isinstance(self.origin, HubDataset):
            return f"{self.origin.hub}: {self.name}"
        return "/".join(filter(None, (self.origin, self.name)))

    @property
    def is_remote(self) -> bool:
        return self.origin is not None


def list_files(sources: Iterable[str | HubDataset], suffixes: Sequence[str]) -> list[StreamFile]:
    """Return the files of sources in their order: paths, globs, URLs, and data sets of the hub at a commit.

    Empty files are left out. Raises ConfigError as find_files, find_objects and file_names, and if the hub cannot be
    reached.
    """
    found: list[StreamFile] = []
    for source in sources:
        if isinstance(source, HubDataset):
            found += _hub_files(source)
        elif is_url(source) and StoreUrl.parse(source).scheme != "file":
            found += _objects(source)
        else:
            path = local_path(StoreUrl.parse(source)) if is_url(source) else source
            found += map(_local, find_files(path, suffixes))
    files = [file for file in found if file.nbytes]
    if not files:
        raise ConfigError(f"data.path: all files of {', '.join(map(str, sources))} are empty")
    return files


def _hub_files(source: HubDataset) -> Iterable[StreamFile]:
    from huggingface_hub import HfApi

    names = file_names(source)
    with hub.explained("data.path", source.hub, "it", "dataset", uses_cache=False):
        info = HfApi().dataset_info(source.hub, revision=source.commit, files_metadata=True, timeout=TIMEOUT_S)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or () if sibling.size is not None}
    if unknown := [name for name in names if name not in sizes]:
        raise ConfigError(
            f"data.path: {source.hub}: the hub does not tell the size of {unknown[0]}, by which data.stream plans; set "
            "data.stream: null"
        )
    return (StreamFile(source, name, sizes[name], None) for name in names)


def _objects(source: str) -> Iterable[StreamFile]:
    store, found, _ = find_objects(StoreUrl.parse(source))
    if any(Path(item.name).name in METADATA for item in found):
        raise ConfigError(
            f"data.path: {source}: a folder of the datasets library is read whole only: name its files, as in "
            f"{source.rstrip('/')}/*.arrow, or leave data.stream out"
        )
    return (StreamFile(str(store.url), *item) for item in found)


def _local(file: Path) -> StreamFile:
    with explained("read", file):
        stats = file.stat()
    return StreamFile(None, str(file.absolute()), stats.st_size, stats.st_mtime_ns)


def divide(files: Sequence[StreamFile], portion_bytes: int) -> tuple[tuple[StreamFile, ...], ...]:
    """Return portions: each is one file, or consecutive files of together at most `portion_bytes`."""
    portions: list[list[StreamFile]] = []
    size = 0
    for file in files:
        if not portions or size + file.nbytes > portion_bytes:
            portions.append([])
            size = 0
        portions[-1].append(file)
        size += file.nbytes
    return tuple(map(tuple, portions))


def listing_of(portions: Sequence[Sequence[StreamFile]]) -> dict[str, Any]:
    """Return what tells portions of files apart from others, as data for JSON: by names, sizes and times of change."""
    tree = [[(Path(file.name).name, file.nbytes, file.modified_ns) for file in portion] for portion in portions]
    files = [file for portion in portions for file in portion]
    return {
        "files": len(files),
        "bytes": sum(file.nbytes for file in files),
        "digest": hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16],
    }


def fetch(
    file: StreamFile, folder: Path, report: Callable[[str], None], waits_s: Sequence[float] = RETRY_WAITS_S
) -> Path:
    """Return the path of a file after fetching it into `folder`; a local one stays where it is.

    report: prints a line about a failure after which it is tried again.
    waits_s: seconds before each further try.

    Raises MegatrainError if it cannot be fetched, or is not what it was when it was listed.
    """
    if not file.is_remote:
        return _unchanged(file)
    for wait_s in (*waits_s, None):
        try:
            return _fetch(file, folder)
        except (ObjectStoreError, ConfigError) as error:
            if wait_s is None:
                raise MegatrainError(f"{file} cannot be fetched, after {len(waits_s) + 1} tries: {error}") from error
            report(f"{file} is fetched again in {wait_s:.0f} s: {error}")
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _fetch(file: StreamFile, folder: Path) -> Path:
    if isinstance(file.origin, HubDataset):
        return _fetch_of_hub(file.origin, file.name, folder)
    assert file.origin is not None  # local files are not fetched
    url = StoreUrl.parse(file.origin)
    target = folder / (file.name or url.path).rpartition("/")[2]
    store = ObjectStore(url)
    listed = StoredObject(file.name, file.nbytes, file.modified_ns)
    with explained("write", target):
        try:
            store.download(listed, target)
        except ObjectStoreError:
            if (now := store.stat(file.name)) != listed:
                raise _changed(file, now and now.nbytes) from None
            raise
    return target


def _fetch_of_hub(source: HubDataset, name: str, folder: Path) -> Path:
    """Fetch a file past the cache of huggingface_hub, which is never emptied."""
    from huggingface_hub import hf_hub_download

    with hub.explained("data.path", source.hub, name, "dataset", uses_cache=False):
        return Path(hf_hub_download(source.hub, name, repo_type="dataset", revision=source.commit, local_dir=folder))


def _unchanged(file: StreamFile) -> Path:
    path = Path(file.name)
    now = _local(path) if path.exists() else None
    if now != file:
        raise _changed(file, now and now.nbytes)
    return path


def _changed(file: StreamFile, nbytes: int | None) -> MegatrainError:
    """Return the error about a file that has changed. `nbytes`: its size now; None: it is gone."""
    now = "it is gone now" if nbytes is None else f"{nbytes} bytes now, or another time of change"
    return MegatrainError(
        f"data.path: {file} has changed since the run listed it: {file.nbytes} bytes then, {now}; restore it, or start "
        "a new run_dir"
    )
