"""Writes folders that appear complete or not at all: under a temporary name next to their final one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.atomic_file import sync
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import (
    MARK_NAME,
    SHARED,
    FolderInUseError,
    FolderKind,
    NotOwnedError,
    OwnedFolder,
    is_free,
    read_mark,
    remove_owned,
)

UNFINISHED = (FolderKind.PARTIAL, FolderKind.TOKENS, FolderKind.RUN_PART)  # kinds of folders that are written here


@contextmanager
def complete_or_absent(out_dir: Path, kind: FolderKind | None = None) -> Iterator[Path]:
    """Yield a folder that is renamed to `out_dir`, durably, if the block succeeds, and is deleted if it fails.

    kind: the finished folder carries a mark of this kind (owned_folder.py); None: it is the user's and carries none.

    Raises ConfigError unless `out_dir` is new or empty, can be written to, and no other process is writing it;
    DiskError for an OSError of the block, and, if `kind` is given, of making the folder, which no user has named.
    """
    target = out_dir.resolve()
    partial = partial_of(target)
    owned = _make(partial, target, out_dir, kind)
    try:
        yield partial
        sync(*partial.iterdir(), partial)
        partial.rename(target)
        if kind is None:
            (target / MARK_NAME).unlink()  # last: without it the folder could not be deleted after a kill
        sync(target, target.parent)
    except OSError as error:
        where = error.filename2 or error.filename or out_dir  # of a copy the second one
        with explained("write", Path(str(where))):
            raise
    finally:
        if partial.exists():
            owned.remove()
        else:
            owned.release()


def partial_of(target: Path) -> Path:
    """Return the path at which the folder `target` is written until it is complete."""
    return target.with_name(f".{target.name}.partial")


def remove_abandoned(folder: Path) -> list[Path]:
    """Delete the unfinished folders of this user's that no process writes any more, and return their paths."""
    removed = []
    for partial in sorted(folder.glob(".*.partial")):
        with suppress(NotOwnedError, OSError):
            _remove(partial)
            removed.append(partial)
    return removed


def _remove(partial: Path) -> None:
    """Delete an unfinished folder. Raises NotOwnedError if it must stay, OSError if it cannot be deleted."""
    if is_free(partial):  # its process was killed before it wrote the mark
        OwnedFolder.make(partial, FolderKind.PARTIAL).remove()
        return
    mark = read_mark(partial)
    remove_owned(partial, mark.kind if mark and mark.kind in UNFINISHED else FolderKind.PARTIAL)


def _make(partial: Path, target: Path, out_dir: Path, kind: FolderKind | None) -> OwnedFolder:
    """Make the folder to write into, after deleting what a killed process left of it."""
    in_use = ConfigError(f"{out_dir} is being written by another process; wait for it, or name another one")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ConfigError(f"{out_dir} exists and is not an empty folder: nothing is overwritten; name another one")
        partial.parent.mkdir(parents=True, exist_ok=True)
        if not is_free(partial):
            _remove(partial)
        return OwnedFolder.make(partial, kind or FolderKind.PARTIAL, mode=SHARED)
    except (BlockingIOError, FileExistsError, FolderInUseError):  # FileExistsError: another process has just made it
        raise in_use from None
    except NotOwnedError as error:
        raise ConfigError(f"cannot write to {out_dir}: {error}; move it away, or name another folder") from None
    except OSError as error:
        if kind is not None:
            with explained("write", out_dir):
                raise
        raise ConfigError(
            f"cannot write to {out_dir}: {error.strerror} ({error.filename}); name another folder"
        ) from None
