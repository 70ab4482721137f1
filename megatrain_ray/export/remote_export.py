"""Exports from the mirror of a run, and to an object store, as to and from folders of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from megatrain_ray.config.urls import StoreUrl, is_url, without_secrets
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.export.describe_export import describe_export
from megatrain_ray.export.export import SaveChoice, choose_save, export_run
from megatrain_ray.io.files.scratch_folder import scratch_folder
from megatrain_ray.io.storage.object_store import ObjectStore, ObjectStoreError
from megatrain_ray.run.best_evaluation import is_no_better
from megatrain_ray.run.fetch_run import fetch_to_export
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.units import format_bytes

UPLOADS_AT_ONCE = 4
LAST = ("config.json", "adapter_config.json")  # what makes a folder one of a model, or of adapters


class ExportReport(NamedTuple):
    """Holds what to print of an export.

    is_no_better: whether no evaluated save of the run is better than the model before training.
    """

    lines: list[str]
    is_no_better: bool


def export_by_name(
    run: str, out: str, dtype: str | None, *, merge: bool, step: SaveChoice, extras: bool
) -> ExportReport:
    """Export a save. The arguments are those of export_run, but `run` may be the URL of a mirror, and `out` any URL.

    What is fetched, and what is to be uploaded, is in a temporary folder meanwhile.

    Raises as export_run, as fetch_to_export, and ConfigError for a URL that cannot be used or is not empty.
    """
    target = _open_empty(out) if is_url(out) else None
    with _local_run(run, step) as (run_dir, chosen):
        if target is None:
            number = export_run(run_dir, Path(out), dtype, merge=merge, step=chosen, extras=extras)
            lines = list(describe_export(Path(out), number))
        else:
            with scratch_folder("export") as parent:
                folder = parent / "model"
                number = export_run(run_dir, folder, dtype, merge=merge, step=chosen, extras=extras)
                lines = [f"exported the save of step {number} to {target.url}: {_upload(folder, target)}"]
        return ExportReport(lines, is_no_better(RunFiles(run_dir.absolute()).evaluations()))


@contextmanager
def _local_run(run: str, step: SaveChoice) -> Iterator[tuple[Path, SaveChoice]]:
    """Yield the directory of a run and which save to export; of a mirror a folder with what an export reads."""
    if not is_url(run):
        yield Path(run), step
        return
    _check_secrets(run)
    with scratch_folder("mirror") as folder:
        yield folder, fetch_to_export(run, folder, lambda files: choose_save(files, step))


def _open_empty(out: str) -> ObjectStore:
    _check_secrets(out)
    try:
        store = ObjectStore(StoreUrl.parse(out))
        found = store.find()
    except ObjectStoreError as error:
        raise ConfigError(f"OUT_DIR: {error}") from None
    if found:
        raise ConfigError(
            f"OUT_DIR: {store.url} holds {found[0].name or 'an object'}: nothing is overwritten; name another place"
        )
    return store


def _check_secrets(url: str) -> None:
    try:
        without_secrets(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _upload(folder: Path, store: ObjectStore) -> str:
    """Write the files of a folder into a store, or none of them, and return how many and how large they are."""
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.name in LAST)
    names = [file.relative_to(folder).as_posix() for file in files]
    first = len([file for file in files if file.name not in LAST])
    try:
        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as threads:
            list(threads.map(store.upload, files[:first], names[:first]))
        for file, name in zip(files[first:], names[first:], strict=True):
            store.upload(file, name)
    except MegatrainError:
        for name in names:
            with suppress(ObjectStoreError):
                store.delete(name)
        raise
    return f"{len(files)} files, {format_bytes(sum(file.stat().st_size for file in files))}"
