"""Copies saves between a folder of saves and an object store, where a save exists once its manifest is there.

In the store the save of step N is saves/step_N/, as in the directory of a run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from megatrain_ray.errors import DamagedSaveError
from megatrain_ray.io.files.atomic_file import sync
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.saves.manifest import MANIFEST_NAME, BlobEntry, Manifest, parse_manifest
from megatrain_ray.io.saves.save_folder import save_folder
from megatrain_ray.io.saves.save_reader import SaveReader
from megatrain_ray.io.storage.blob_store import FileStore
from megatrain_ray.io.storage.object_store import ObjectStore, StoredObject

FOLDER = "saves"
MANIFEST = re.compile(rf"{FOLDER}/step_(0|[1-9]\d*)/{re.escape(MANIFEST_NAME)}")
BLOBS_AT_ONCE = 4  # about 110 MiB of memory each while they are uploaded


def mirrored_steps(found: Iterable[StoredObject]) -> list[int]:
    """Return the steps of the saves that are in a store, ascending. `found`: all its objects."""
    return sorted(int(match[1]) for item in found if (match := MANIFEST.fullmatch(item.name)))


def mirrored_name(step: int, name: str) -> str:
    """Return the name of the object that a file of a save becomes."""
    return f"{FOLDER}/step_{step}/{name}"


def read_mirrored(store: ObjectStore, step: int) -> Manifest:
    """Return the manifest of a save in a store. Raises DamagedSaveError, ObjectStoreError."""
    name = mirrored_name(step, MANIFEST_NAME)
    return parse_manifest(store.read(name), f"{store.url}/{name}")


def upload_blobs(
    store: ObjectStore, folder: Path, step: int, blobs: Iterable[BlobEntry],
    retried: Callable[[Callable[[], None]], None], advance: Callable[[str, int], None],
) -> None:  # fmt: skip
    """Write blobs of a save into a store, several at a time.

    retried: calls a function that uploads a blob, and again after an ObjectStoreError as often as it likes.
    advance: is called with the name of a blob and how many of its bytes are uploaded; what it raises ends the upload.

    Raises ObjectStoreError, OSError if a blob is gone.
    """

    def upload(blob: BlobEntry) -> None:
        store.upload(folder / blob.name, mirrored_name(step, blob.name), partial(advance, blob.name))

    with ThreadPoolExecutor(BLOBS_AT_ONCE) as threads:
        list(threads.map(lambda blob: retried(partial(upload, blob)), blobs))


def missing_blobs(store: ObjectStore, found: Iterable[StoredObject], manifest: Manifest) -> list[BlobEntry]:
    """Return the blobs of a save that are not in a store with their sizes. Raises ObjectStoreError.

    found: all its objects. A blob that is not among them is asked for by name: some stores list new objects late.
    """
    sizes = {item.name: item.nbytes for item in found}
    missing = []
    for blob in manifest.blobs():
        name = mirrored_name(manifest.step, blob.name)
        if sizes.get(name) != blob.nbytes and ((there := store.stat(name)) is None or there.nbytes != blob.nbytes):
            missing.append(blob)
    return missing


def commit_mirrored(store: ObjectStore, folder: Path, step: int) -> None:
    """Make a save exist in a store, after all its blobs are there. Raises ObjectStoreError, OSError."""
    store.write(mirrored_name(step, MANIFEST_NAME), (folder / MANIFEST_NAME).read_bytes())


def delete_mirrored(store: ObjectStore, step: int) -> None:
    """Delete a save of a store, its manifest first, so that what is left after a kill is no save."""
    store.delete(mirrored_name(step, MANIFEST_NAME))
    store.delete_folder(f"{FOLDER}/step_{step}")


def download_blobs(store: ObjectStore, manifest: Manifest, saves_dir: Path, kinds: Collection[str]) -> None:
    """Write the blobs of some kinds into the folder of a save, durably.

    Raises DamagedSaveError for one of another size than the manifest says, ObjectStoreError, DiskError.
    """
    folder = save_folder(saves_dir, manifest.step)

    def download(blob: BlobEntry) -> None:
        name = mirrored_name(manifest.step, blob.name)
        found = store.stat(name)
        if found is None or found.nbytes != blob.nbytes:
            size = "it is missing" if found is None else f"got {found.nbytes}"
            raise DamagedSaveError(f"{store.url}/{name}: expected {blob.nbytes} bytes, {size}")
        with explained("write", folder / blob.name):
            store.download(found, folder / blob.name)
            sync(folder / blob.name)

    with ThreadPoolExecutor(BLOBS_AT_ONCE) as threads:
        list(threads.map(download, (blob for blob in manifest.blobs() if blob.kind in kinds)))


def check_downloaded(manifest: Manifest, saves_dir: Path) -> None:
    """Raise DamagedSaveError unless all bytes of a save's blobs are those that its manifest vouches for."""
    reader = SaveReader(FileStore(save_folder(saves_dir, manifest.step)), manifest)
    for problem in asyncio.run(reader.problems()):
        raise DamagedSaveError(problem)
