"""Fetches what a mirror has of a run into a directory: to go on with the run, or to export one of its saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.logs import say
from megatrain_ray.errors import ConfigError, DamagedSaveError
from megatrain_ray.io.files.atomic_file import sync, temporary_file
from megatrain_ray.io.files.disk_errors import check_room, explained
from megatrain_ray.io.files.owned_folder import FolderKind, OwnedFolder, has_mark
from megatrain_ray.io.saves.manifest import ITEMSIZES, MANIFEST_NAME
from megatrain_ray.io.saves.mirrored_saves import (
    check_downloaded,
    download_blobs,
    mirrored_name,
    mirrored_steps,
    read_mirrored,
)
from megatrain_ray.io.saves.save_folder import abandon_save, commit_save, list_saves, prepare_save, save_folder
from megatrain_ray.io.storage.object_store import ObjectStore, ObjectStoreError, StoredObject
from megatrain_ray.read_file import parse_json
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import HISTORY_NAME
from megatrain_ray.run.run_model import MODEL_NAME
from megatrain_ray.units import format_bytes

OWNER_NAME = "mirror.json"
CONFIG_NAME = "config.yaml"
# What a resume or an export on another machine reads beside saves: files, and folders with all that is in them.
FILES = (CONFIG_NAME, "plan.json", "metrics.jsonl", "evaluations.jsonl", HISTORY_NAME, MODEL_NAME)
FOLDERS = ("plans", "tokenizer", "inputs")
ROLLOUTS = "rollouts"  # of this one the files only: tokens are made again


@contextmanager
def reading_mirror() -> Iterator[None]:
    """Turn an ObjectStoreError of the block into a ConfigError."""
    try:
        yield
    except ObjectStoreError as error:
        raise ConfigError(f"save_mirror: {error}") from None


def check_owner(store: ObjectStore, names: set[str], token: str) -> bool:
    """Return whether a mirror is marked as this run's; an empty one is not. Raises ConfigError if it is not free."""
    if OWNER_NAME not in names:
        if names:
            raise ConfigError(
                f"save_mirror: {store.url} holds {min(names)}, and no mirror of a run; name another place"
            )
        return False
    try:
        owner = parse_json(store.read(OWNER_NAME))["run"]
    except (ValueError, KeyError, TypeError):
        owner = None
    if owner != token:
        raise ConfigError(
            f"save_mirror: {store.url} is the mirror of another run; name another place, or to go on with that run, "
            "an empty run_dir"
        )
    return True


def is_mirrored(name: str) -> bool:
    """Return whether a file of a run's directory goes into its mirror. `name`: its path in the directory."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/") or parts[-1].startswith("."):
        return False
    return name in FILES or (len(parts) > 1 and parts[0] in FOLDERS) or (len(parts) == 2 and parts[0] == ROLLOUTS)


def fetch_newer(files: RunFiles, url: str, check: Callable[[TrainConfig], None]) -> bool:
    """Fetch the newest save of a mirror and the files of its run, unless the run's directory has one as new.

    files: of a directory whose lock is held; it may be empty.
    check: is called with the configuration of the mirror's run before anything is fetched.

    Return whether something was fetched. Raises ConfigError for a mirror that cannot be read or is another run's,
    DamagedSaveError if it has newer saves, and none is whole, CapacityError if there is no room for one, DiskError.
    """
    with reading_mirror():
        store = ObjectStore(StoreUrl.parse(url))
        found = store.find()
        newest = max(list_saves(files.saves), default=-1) if files.holds_run else -1
        steps = [step for step in mirrored_steps(found) if step > newest]
        if not steps:
            return False
        with temporary_file(files.path / CONFIG_NAME) as settings:
            settings.write_bytes(store.read(CONFIG_NAME))
            check(load_config(settings).as_begun())
        problem: DamagedSaveError | None = None
        for step in reversed(steps):
            try:
                _fetch_save(store, step, files)
            except DamagedSaveError as damage:
                problem = damage
                say(f"warning: save_mirror: {damage}")
                continue
            _fetch_files(store, found, files.path)
            return True
    raise problem or AssertionError


def _fetch_save(store: ObjectStore, step: int, files: RunFiles) -> None:
    manifest = read_mirrored(store, step)
    token = files.read_token()
    if token is not None and token != manifest.run:
        raise ConfigError(
            f"save_mirror: {store.url} is the mirror of another run than {files.path}; name another place, or to go on "
            "with that run, an empty run_dir"
        )
    if not has_mark(files.path, FolderKind.RUN):
        with explained("write", files.path):
            OwnedFolder.mark_existing(files.path, FolderKind.RUN, manifest.run).release()
    if step in list_saves(files.saves):  # a start was killed while it fetched the other files
        return
    num_bytes = sum(blob.nbytes for blob in manifest.blobs())
    check_room(files.saves, num_bytes, f"the save of step {step}", "free some, or choose another run_dir")
    say(f"fetching the save of step {step} ({format_bytes(num_bytes)}) from {store.url}")
    prepare_save(files.saves, step, manifest.run)
    try:
        download_blobs(store, manifest, files.saves, manifest.itemsize)
        check_downloaded(manifest, files.saves)
    except BaseException:
        abandon_save(files.saves, step)
        raise
    commit_save(files.saves, step, manifest)


def _fetch_files(store: ObjectStore, found: Sequence[StoredObject], folder: Path) -> None:
    """Fetch the files of a run, config.yaml last: with it the directory holds the run."""
    for item in sorted(found, key=lambda item: (item.name == CONFIG_NAME, item.name)):
        if not is_mirrored(item.name):
            continue
        file = folder / item.name
        with explained("write", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with temporary_file(file) as temporary:
                store.download(item, temporary)
                sync(temporary)
                temporary.replace(file)
                sync(file.parent)


def fetch_to_export(url: str, folder: Path, choose: Callable[[RunFiles], int]) -> int:
    """Fetch into a new folder what an export reads of a mirror: the files of the run, and the weights of one save.

    choose: returns the step of the save, from the files of the run and the manifests of all saves.

    Return that step. Raises ConfigError if the mirror cannot be read or holds no run, DamagedSaveError, CapacityError,
    DiskError, and what `choose` raises.
    """
    files = RunFiles(folder)
    with reading_mirror():
        store = ObjectStore(StoreUrl.parse(url))
        found = store.find()
        _fetch_files(store, [item for item in found if not item.name.startswith(f"{ROLLOUTS}/")], folder)
        for step in mirrored_steps(found):
            save_folder(files.saves, step).mkdir(parents=True)
            (save_folder(files.saves, step) / MANIFEST_NAME).write_bytes(store.read(mirrored_name(step, MANIFEST_NAME)))
        if not files.holds_run:
            raise ConfigError(f"{store.url} is no mirror of a run: it holds no {CONFIG_NAME}")
        step = choose(files)
        manifest = read_mirrored(store, step)
        kinds = [kind for kind in manifest.itemsize if kind in ITEMSIZES]  # without the moments
        num_bytes = sum(blob.nbytes for blob in manifest.blobs() if blob.kind in kinds)
        check_room(folder, num_bytes, f"the weights of the save of step {step}", "free some, or name another OUT_DIR")
        download_blobs(store, manifest, files.saves, kinds)
    return step
