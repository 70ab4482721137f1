"""Saves of a run: folders step_N, each of which exists once its manifest has its name, and not a moment earlier."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.blob_store import FileStore
from megatrain_ray.io.manifest import MANIFEST_NAME, Manifest, PartManifest, read_manifest
from megatrain_ray.io.pieces import Piece as Piece
from megatrain_ray.io.pieces import write_blobs
from megatrain_ray.io.save_reader import SaveReader


def save_folder(saves_dir: Path, step: int) -> Path:
    return saves_dir / f"step_{step}"


def list_saves(saves_dir: Path) -> list[int]:
    """Steps of the committed saves, ascending."""
    return sorted(step for step, folder in _folders(saves_dir).items() if (folder / MANIFEST_NAME).is_file())


def load_manifest(saves_dir: Path, step: int) -> Manifest:
    """Raises MegatrainError when there is no such save or its manifest is damaged."""
    return read_manifest(save_folder(saves_dir, step))


def prepare_save(saves_dir: Path, step: int) -> Path:
    """A new folder for `write_part`, where what an unfinished save of this step left is gone.

    Raises MegatrainError when that save exists already: a good save is never overwritten.
    """
    folder = save_folder(saves_dir, step)
    if (folder / MANIFEST_NAME).exists():
        raise MegatrainError(f"{folder} is a finished save already; delete it to save step {step} once more")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


async def write_part(folder: Path, part: int, pieces: Iterable[Piece]) -> PartManifest:
    """Writes one shard's pieces, which must not change meanwhile; durable on return. Raises MegatrainError."""
    return await write_blobs(FileStore(folder), part, pieces)


def commit_save(saves_dir: Path, step: int, manifest: Manifest) -> None:
    """Makes the save exist, after all parts are written; durable on return.

    Raises MegatrainError, and the save does not exist, when a part left something out or is not there as written.
    """
    folder = save_folder(saves_dir, step)
    gaps = manifest.gaps()
    if gaps:
        raise MegatrainError(f"{folder} would not be whole: {gaps[0]} ({len(gaps)} such gaps)")
    asyncio.run(_check_sizes(folder, manifest))
    partial = folder / f"{MANIFEST_NAME}.partial"
    with partial.open("wb") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)  # the names of the blobs, before the one name that vouches for them
    partial.rename(folder / MANIFEST_NAME)
    for changed in (folder, saves_dir, saves_dir.parent):
        _sync_folder(changed)


def prune(saves_dir: Path, keep: int) -> None:
    """Deletes all but the newest `keep` saves, and never the newest."""
    for step in list_saves(saves_dir)[: -max(1, keep)]:
        folder = save_folder(saves_dir, step)
        (folder / MANIFEST_NAME).unlink()
        _sync_folder(folder)  # killed from here on, it is an unfinished save
        shutil.rmtree(folder)


def clean_unfinished(saves_dir: Path) -> None:
    """Deletes what saves that were never finished, or half deleted, left behind."""
    for folder in _folders(saves_dir).values():
        if not (folder / MANIFEST_NAME).exists():
            shutil.rmtree(folder)


async def read_pieces(folder: Path, manifest: Manifest, wanted: Iterable[Piece]) -> None:
    """Fills the writable buffers of each wanted piece, whatever the number of shards that wrote the save.

    Raises MegatrainError naming blob, layer and kind for what the save does not hold or what is damaged.
    """
    await SaveReader(FileStore(folder), manifest).read(wanted)


def verify(folder: Path) -> list[str]:
    """Reads a whole save and says what is wrong with it; empty when it is good."""
    try:
        manifest = read_manifest(folder)
    except MegatrainError as error:
        return [str(error)]
    return asyncio.run(SaveReader(FileStore(folder), manifest).problems())


async def _check_sizes(folder: Path, manifest: Manifest) -> None:
    reader = SaveReader(FileStore(folder), manifest)
    for blob in manifest.blobs():
        await reader.check_size(blob)


def _folders(saves_dir: Path) -> dict[int, Path]:
    """Every folder of a save by its step, finished or not."""
    if not saves_dir.is_dir():
        return {}
    steps = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in saves_dir.iterdir())
    return {int(match[1]): path for match, path in steps if match and path.is_dir()}


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
