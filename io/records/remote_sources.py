"""Copies the files of a data source in an object store into a folder, where they are read as local files are.

A copy has the path, the size and the time of change of its object, as with rsync. So it is recognised at the next
start, and so are the tokens that were made of it.
"""

from __future__ import annotations

import filecmp
import glob
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.atomic_file import TEMPORARY, temporary_file
from megatrain_ray.io.files.disk_errors import check_room, explained
from megatrain_ray.io.records.file_formats import suffix_of
from megatrain_ray.io.records.find_files import METADATA, unknown_format
from megatrain_ray.io.storage.object_store import ObjectStore, ObjectStoreError, StoredObject
from megatrain_ray.units import format_bytes, format_quantity

DOWNLOADS_AT_ONCE = 8
TRIES = 3  # of a file, each after the retries of the library itself
STALE_S = 3600.0  # a temporary file that has not grown for so long was left by a kill
ADVICE = "free some, name a folder on another disk in XDG_CACHE_HOME, or name fewer files"


def local_copy(source: str, root: Path, report: Callable[[str], None]) -> str:
    """Return the local path, or glob, that means the same as a URL: a file, a folder, or a glob.

    Files whose copies are missing or outdated are fetched. Copies whose objects are gone are deleted.

    root: folder of all copies; the copy of SCHEME://BUCKET/PATH is SCHEME/BUCKET/PATH there.
    report: prints a line.

    Raises ConfigError if the store cannot be read or has no such files, CapacityError if there is no room for them,
    DiskError.
    """
    url = StoreUrl.parse(source)
    if url.scheme == "file":
        return local_path(url)
    store, found, pattern = find_objects(url)
    folder = root / url.scheme / url.host / store.url.path
    try:
        _fetch(store, found, folder, root, report)
    except ObjectStoreError as error:
        raise ConfigError(f"data.path: {error}") from None
    wanted = _wanted(pattern)
    if found[0].name:
        _delete_others(folder, {item.name for item in found}, wanted)
    return str(Path(glob.escape(str(folder)), *pattern)) if wanted else str(Path(folder, *pattern))


def local_path(url: StoreUrl) -> str:
    """Return the path of a URL of scheme `file`. Raises ConfigError if it names a machine."""
    if url.host:
        raise ConfigError(f"data.path: {url} names the machine {url.host}; a local file is file:///PATH")
    return f"/{url.path}"


def find_objects(url: StoreUrl) -> tuple[ObjectStore, list[StoredObject], list[str]]:
    """Return the store of a folder or file, the objects in it that a URL means, and the rest of the URL: a glob.

    Raises ConfigError if the store cannot be read or has no such objects.
    """
    place, pattern = _split(url)
    try:
        store = ObjectStore(place)
        found = [item for item in store.find() if _is_read(item.name, _wanted(pattern))]
    except ObjectStoreError as error:
        raise ConfigError(f"data.path: {error}") from None
    if not found and store.lacks_bucket():
        raise ConfigError(
            f"data.path: {url}: the store has no bucket {url.host}; check its name, and which server, region or "
            "account it belongs to"
        )
    _check(found, url)
    return store, found, pattern


def _wanted(pattern: list[str]) -> list[str]:
    """Return a glob; nothing for a dataset_info.json, which names other files of its folder."""
    return pattern if pattern[-1:] != ["dataset_info.json"] else []


def _split(url: StoreUrl) -> tuple[StoreUrl, list[str]]:
    """Return the folder or file to list, and the parts of a glob, or the name of a dataset_info.json, in it."""
    parts = url.path.split("/")
    if ".." in parts:
        raise ConfigError(f"data.path: {url} holds ..; name the path that is meant")
    fixed = next((k for k, part in enumerate(parts) if set(part) & set("*[")), len(parts))
    if parts[-1] == "dataset_info.json" and fixed == len(parts):
        fixed -= 1
    return url.at("/".join(parts[:fixed])), parts[fixed:]


def _is_read(name: str, pattern: Sequence[str]) -> bool:
    """Return whether an object is read: of a known format, not hidden, and matched by the glob or in a folder that is.

    Names that would lead out of the folder of the copy count as hidden: with a part that is empty, or `..`. An object
    without a name was named by its URL, so it is read, or refused.
    """
    if not name:
        return True
    parts = name.split("/")
    is_visible = not any(not part or part.startswith(".") for part in parts)
    return is_visible and suffix_of(Path(name)) is not None and _matches(parts, pattern)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path or a folder that it is in matches a glob; `**` stands for any number of folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (len(parts) > 0 and _matches(parts[1:], pattern))
    return len(parts) > 0 and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _check(found: Sequence[StoredObject], url: StoreUrl) -> None:
    """Raise ConfigError for no objects at all, and for one of another format."""
    if all(Path(item.name).name in METADATA for item in found):
        raise ConfigError(f"data.path: {url}: no such file, and no folder or glob with files of a known format")
    if not found[0].name and suffix_of(Path(url.path)) is None:
        raise unknown_format(str(url))


def _fetch(
    store: ObjectStore, found: Sequence[StoredObject], folder: Path, root: Path, report: Callable[[str], None]
) -> None:
    """Fetch the objects whose copies are missing or outdated."""
    missing = [item for item in found if not _is_current(folder / item.name, item)]
    if not missing:
        return
    num_bytes = sum(item.nbytes for item in missing)
    check_room(folder, num_bytes, f"a copy of {store.url}", ADVICE)
    report(f"fetching {format_quantity(len(missing), 'file')} ({format_bytes(num_bytes)}) of {store.url} into {folder}")
    with explained("make", root):
        root.mkdir(0o700, parents=True, exist_ok=True)  # other users may not read the copies
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as threads:
        list(threads.map(partial(_fetch_one, store, folder), missing))


def _fetch_one(store: ObjectStore, folder: Path, item: StoredObject) -> None:
    copy = folder / item.name
    with explained("write", copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        _delete_stale(copy)
        with temporary_file(copy) as temporary:
            for tries_left in reversed(range(TRIES)):
                try:
                    store.download(item, temporary)
                    break
                except ObjectStoreError:
                    if not tries_left:
                        raise
            if item.modified_ns is not None:
                os.utime(temporary, ns=(item.modified_ns, item.modified_ns))
            elif copy.exists() and filecmp.cmp(temporary, copy, shallow=False):
                return  # keeps its time of change, by which tokens are found
            temporary.replace(copy)


def _is_current(copy: Path, item: StoredObject) -> bool:
    with suppress(OSError):
        stats = copy.stat()
        return (stats.st_size, stats.st_mtime_ns) == (item.nbytes, item.modified_ns)
    return False


def _delete_stale(copy: Path) -> None:
    """Delete what a killed process left of a copy."""
    for file in copy.parent.glob(f".{copy.name}.*.new"):
        if TEMPORARY.fullmatch(file.name) and time.time() - file.stat().st_mtime > STALE_S:
            file.unlink(missing_ok=True)


def _delete_others(folder: Path, names: set[str], pattern: Sequence[str]) -> None:
    """Delete the copies of objects that are gone: a glob or a folder would read them."""
    for file in folder.rglob("*"):
        name = file.relative_to(folder).as_posix()
        if name not in names and _is_read(name, pattern) and file.is_file():
            with explained("delete", file):
                file.unlink(missing_ok=True)
