"""Folders that are complete or not there: written under another name, beside where they will be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.durable import sync, take_lock

LOCK_NAME = ".lock"  # held by who writes the folder; a file, since NFS locks no folders


@contextmanager
def complete_or_absent(out_dir: Path) -> Iterator[Path]:
    """A folder that takes the name `out_dir` when the block ends well, durably, and is gone when it does not.

    Raises ConfigError unless `out_dir` is new or empty and nobody else is writing it, MegatrainError for an OSError of
    the block.
    """
    target = out_dir.resolve()
    partial = target.with_name(f".{target.name}.partial")
    lock = _make(partial, target, out_dir)
    try:
        yield partial
        sync(*partial.iterdir(), partial)
        partial.rename(target)
        (target / LOCK_NAME).unlink()  # last: without it another process could take the folder for abandoned
        sync(target, target.parent)
    except OSError as error:
        raise MegatrainError(f"cannot write {error.filename or out_dir}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def remove_abandoned(folder: Path) -> list[Path]:
    """Deletes the unfinished folders in `folder` that nobody writes any more, and returns what they were.

    Those of other users stay: they are in nobody's way.
    """
    return [partial for partial in sorted(folder.glob(".*.partial")) if partial.is_dir() and _remove(partial)]


def _remove(partial: Path) -> bool:
    try:
        lock = take_lock(partial / LOCK_NAME)
    except OSError:  # held, or of another user
        return False
    shutil.rmtree(partial, ignore_errors=True)
    os.close(lock)
    return not partial.exists()


def _make(partial: Path, target: Path, out_dir: Path) -> int:
    """The new folder's lock."""
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ConfigError(f"{out_dir} exists and is not an empty folder: nothing is overwritten; name another one")
        partial.mkdir(parents=True, exist_ok=True)
        lock = take_lock(partial / LOCK_NAME)
    except BlockingIOError:
        raise ConfigError(f"{out_dir} is being written by another process; wait for it, or name another one") from None
    except OSError as error:
        raise _refusal(out_dir, error) from None
    try:
        for left in partial.iterdir():  # by one that was killed
            if left.name != LOCK_NAME:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    except OSError as error:
        os.close(lock)
        raise _refusal(out_dir, error) from None
    return lock


def _refusal(out_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write to {out_dir}: {error.strerror} ({error.filename}); name another folder")
