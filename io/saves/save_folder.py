"""Manages the saves of a run: folders step_N.

A save exists from the moment that its manifest has its final name, and not earlier. A damaged save that was set aside
is a folder step_N.damaged. Nothing here reads or deletes such a folder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import DamagedSaveError, MegatrainError
from megatrain_ray.io.files.atomic_file import sync
from megatrain_ray.io.files.disk_errors import DiskFullError, explained
from megatrain_ray.io.files.owned_folder import (
    SHARED,
    FolderKind,
    NotOwnedError,
    OwnedFolder,
    is_free,
    remove_owned,
    why_not_owned,
)
from megatrain_ray.io.saves.manifest import MANIFEST_NAME, Manifest, PartManifest, read_manifest
from megatrain_ray.io.saves.piece_codec import compressed_bound
from megatrain_ray.io.saves.save_reader import SaveReader
from megatrain_ray.io.saves.save_writer import STORED_BYTES, Piece, write_blobs
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, FileStore
from megatrain_ray.spans import SpanLog

NUM_PIECES = 6  # most pieces of a layer in a part: four kinds of what is trained, two of what is frozen
ENTRY_BYTES = 512  # most bytes of a stored piece's entry in the manifest
LAYER_BYTES = 64 << 10  # most bytes of a layer's entry there: 400 parameters
REST_BYTES = 1 << 20  # most bytes of everything else there


def save_room(num_bytes: int, num_layers: int, num_shards: int) -> int:
    """Return the most bytes on disk that a save of `num_bytes` of state takes, compressed or not."""
    num_pieces = -(-num_bytes // STORED_BYTES) + num_layers * NUM_PIECES * num_shards
    manifest = REST_BYTES + num_layers * LAYER_BYTES + num_pieces * ENTRY_BYTES
    return compressed_bound(num_bytes) + num_pieces * (64 + ALIGN_BYTES) + manifest


def save_folder(saves_dir: Path, step: int) -> Path:
    return saves_dir / f"step_{step}"


def list_saves(saves_dir: Path) -> list[int]:
    """Return the steps of the committed saves, ascending."""
    return sorted(step for step, path in _named(saves_dir) if _is_committed(path))


def list_set_aside(saves_dir: Path) -> list[Path]:
    """Return the folders of damaged saves that were set aside."""
    return sorted(path for path in saves_dir.glob("step_*.damaged*") if path.is_dir())


def load_manifest(saves_dir: Path, step: int) -> Manifest:
    """Read the manifest of the save of a step. Raises as read_manifest."""
    return read_manifest(save_folder(saves_dir, step))


def prepare_save(saves_dir: Path, step: int, run: str | None = None) -> Path:
    """Make the folder for `write_part`, and delete what an unfinished save of this step left.

    Raises MegatrainError if there is a finished save, which is never overwritten, or something else of its name.

    run: the run's token.
    """
    folder = save_folder(saves_dir, step)
    if _is_committed(folder):
        raise MegatrainError(f"{folder} is a finished save already; delete it to save step {step} once more")
    with explained("make", folder):
        saves_dir.mkdir(parents=True, exist_ok=True)
        try:
            if not is_free(folder):
                remove_owned(folder, FolderKind.SAVE, token=run)
            OwnedFolder.make(folder, FolderKind.SAVE, run, SHARED).release()
        except (NotOwnedError, FileExistsError) as error:
            reason = error if isinstance(error, NotOwnedError) else f"{folder} is no folder that this program made"
            raise MegatrainError(
                f"the save of step {step} cannot be made: {reason}; move it away, and start again"
            ) from None
    return folder


async def write_part(
    folder: Path, part: int, pieces: Iterable[Piece], done: Callable[[Piece], None] = lambda part: None,
    compression: SaveCompression = "none", spans: SpanLog | None = None,
) -> PartManifest:  # fmt: skip
    """Write one shard's pieces into the folder of `prepare_save`, as `write_blobs` does.

    Raises MegatrainError, or DiskFullError if there is no room.
    """
    # An abandoned writer may still run when its save is made again, in a new folder of the same name.
    with _abandoned_when_full(folder), FileStore.to_write(folder) as store:
        return await write_blobs(store, part, pieces, done, compression, spans)


def commit_save(saves_dir: Path, step: int, manifest: Manifest) -> None:
    """Make the save exist, after all parts are written. It is durable on return.

    Raises MegatrainError if a part left something out, if a blob is not there as written, or if the manifest cannot be
    written. Then the save does not exist, and what was written of it is deleted.
    """
    folder = save_folder(saves_dir, step)
    gaps = manifest.gaps()
    try:
        if gaps:
            raise MegatrainError(f"{folder} would not be whole: {gaps[0]} ({len(gaps)} such gaps)")
        reader = SaveReader(FileStore(folder), manifest)
        for blob in manifest.blobs():
            reader.check_size(blob)
        with _abandoned_when_full(folder), explained("write", folder / MANIFEST_NAME):
            _write_manifest(folder, manifest)
    except MegatrainError as error:
        abandon_save(saves_dir, step)
        if isinstance(error, DamagedSaveError):  # there is no save yet that could be damaged
            raise MegatrainError(str(error)) from None
        raise


def abandon_save(saves_dir: Path, step: int) -> None:
    """Delete what was written of a save that will not be finished. Call only when nobody writes to it any more."""
    folder = save_folder(saves_dir, step)
    if not _is_committed(folder):
        with suppress(OSError, NotOwnedError):
            remove_owned(folder, FolderKind.SAVE)


def set_aside(saves_dir: Path, step: int) -> Path:
    """Rename a damaged save's folder to step_N.damaged, and return the new folder. Durable on return.

    It is no save any more, but its bytes are kept. If that name is taken, it becomes step_N.damaged.2, and so on.
    Raises MegatrainError if it cannot be renamed.
    """
    folder = save_folder(saves_dir, step)
    names = itertools.chain([""], (f".{k}" for k in itertools.count(2)))
    target = next(path for name in names if not (path := saves_dir / f"{folder.name}.damaged{name}").exists())
    with explained("rename", folder):
        folder.rename(target)
        sync(saves_dir)
    return target


def prune(saves_dir: Path, keep: int, run: str | None = None, kept: Collection[int | None] = ()) -> None:
    """Delete all but the newest `keep` of the saves that the run with token `run` made, and never the newest.

    These saves are neither counted nor deleted: that of a step in `kept`, one that was moved away and linked, one
    of another run, and one without a mark. Raises MegatrainError.
    """
    steps = [step for step in list_saves(saves_dir) if not (step in kept or why_kept(saves_dir, step, run))]
    for step in steps[: -max(1, keep)]:
        folder = save_folder(saves_dir, step)
        with explained("delete", folder):
            (folder / MANIFEST_NAME).unlink()
            sync(folder)  # if this process is killed from here on, it is an unfinished save
            remove_owned(folder, FolderKind.SAVE, token=run)


def why_kept(saves_dir: Path, step: int, run: str | None = None) -> str | None:
    """Return why `prune` would never delete this save; None if it may."""
    return why_not_owned(save_folder(saves_dir, step), FolderKind.SAVE, token=run)


def clean_unfinished(saves_dir: Path, run: str | None = None) -> list[Path]:
    """Delete the folders of saves that were never finished, or half deleted, and return them.

    Folders without this program's mark stay. Raises MegatrainError if one of its own cannot be deleted.
    """
    deleted = []
    for _, path in _named(saves_dir):
        if path.is_dir() and not _is_committed(path):
            with explained("delete", path), suppress(NotOwnedError):
                remove_owned(path, FolderKind.SAVE, token=run)
                deleted.append(path)
    return deleted


def in_the_way(saves_dir: Path, run: str | None = None) -> list[str]:
    """Return why things that have the name of a save, but are none, are not deleted. A save may use an empty folder."""
    left = (path for _, path in _named(saves_dir) if not _is_committed(path) and not is_free(path))
    return [reason for path in left if (reason := why_not_owned(path, FolderKind.SAVE, token=run))]


async def read_pieces(folder: Path, manifest: Manifest, wanted: Iterable[Piece]) -> None:
    """Fill the writable buffers of each wanted piece, whatever the number of shards that wrote the save.

    Raises as SaveReader.read.
    """
    await SaveReader(FileStore(folder), manifest).read(wanted)


def verify(folder: Path) -> list[str]:
    """Read a whole save and return descriptions of what is wrong with it; empty if it is good."""
    try:
        manifest = read_manifest(folder)
    except MegatrainError as error:
        return [str(error)]
    return asyncio.run(SaveReader(FileStore(folder), manifest).problems())


@contextmanager
def _abandoned_when_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except DiskFullError as error:
        raise DiskFullError(
            f"{error}; {folder.name} is abandoned, the saves before it are intact: free some space, lower save_keep, "
            "or use another run_dir"
        ) from None


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    partial = folder / f"{MANIFEST_NAME}.partial"
    with partial.open("wb") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    sync(folder)  # makes the blobs' names durable before the manifest's name, which vouches for them
    partial.rename(folder / MANIFEST_NAME)
    sync(folder, folder.parent, folder.parent.parent)


def _is_committed(folder: Path) -> bool:
    """Return whether the folder is a finished save. Raises MegatrainError if that cannot be found out now."""
    with explained("read", folder / MANIFEST_NAME):
        try:
            return stat.S_ISREG((folder / MANIFEST_NAME).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def _named(saves_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yield everything that has the name of a save, finished or not, with its step."""
    for path in list(saves_dir.iterdir()) if saves_dir.is_dir() else ():
        if match := re.fullmatch(r"step_(0|[1-9]\d*)", path.name):
            yield int(match[1]), path
