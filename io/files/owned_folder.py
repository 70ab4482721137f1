"""Makes folders that carry a mark, and deletes only folders whose mark shows that this program made them.

A mark is a file that says what the folder is for, which user and process made it, and a random token. A folder is
deleted only if its mark allows it, never because of its name or age, and never through a link. The process that makes a
folder holds a lock on the mark while nobody else may delete it. The kernel releases the lock when the process dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.atomic_file import sync
from megatrain_ray.io.files.process_identity import PidNamespace, start_ticks

MARK_NAME = "owner.json"
MADE_BY = "megatrain-ray"
PRIVATE = 0o700  # mode of a folder: no other user can read it or put anything into it
SHARED = 0o777  # mode of a folder that others may read or write as far as the umask lets them
# Raised when a file that is no mark is read as one.
NO_MARK = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
MARK_BYTES = 4096  # upper bound on the size of a mark


class FolderKind(Enum):
    """Names what a folder was made for."""

    SESSION = "Ray's session folder of one start of a run"
    RUN = "a run"
    SAVE = "a save of a run"
    RUN_PART = "files that a run copied into its directory"
    PARTIAL = "a folder that is not finished"
    TOKENS = "tokens of a data source"
    SCRATCH = "what a demo or a benchmark made"


# The lock of the run's directory, which whoever deletes these holds, says that no other process of the run uses them.
# The process that made them may live on: a notebook, after its training.
GUARDED = (FolderKind.SAVE, FolderKind.RUN_PART)


class NotOwnedError(MegatrainError):
    """Says that a folder is not deleted, because nothing shows that this program made it and that it is unused."""


class FolderInUseError(NotOwnedError):
    """Says that a folder is not deleted, because a process still uses it."""


@dataclass(frozen=True)
class Mark:
    """Holds the contents of a folder's mark.

    token: random, the same for a run and all its saves.
    inode: inode of the folder; a copy of the folder made by the user has another one.
    uid: the user who made it.
    pid, start_ticks, namespace: the process that made it.
    """

    kind: FolderKind
    token: str
    inode: int
    uid: int
    pid: int
    start_ticks: int
    namespace: PidNamespace

    @staticmethod
    def of_this_process(folder: Path, kind: FolderKind, token: str | None = None) -> Mark:
        """Return a mark for `folder`, which this process is making. Without `token` it gets a new random one."""
        return Mark(
            kind=kind,
            token=token or secrets.token_hex(16),
            inode=folder.stat().st_ino,
            uid=os.geteuid(),
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()) or 0,
            namespace=PidNamespace.current(),
        )

    @property
    def is_of_this_process(self) -> bool:
        return self.pid == os.getpid() and self.maker_lives

    @property
    def maker_lives(self) -> bool:
        """Return whether the process that made the folder still runs; False if it is of another container."""
        return self.namespace.is_current and start_ticks(self.pid) == self.start_ticks

    def to_json(self) -> str:
        tree = asdict(self) | {"kind": self.kind.name.lower()}
        return json.dumps({"made_by": MADE_BY, "for": self.kind.value} | tree, indent=1) + "\n"

    @staticmethod
    def from_json(text: bytes) -> Mark:
        """Parse a mark. Raises ValueError, KeyError, TypeError or AttributeError for anything that is no mark."""
        tree: dict[str, Any] = json.loads(text)
        if tree.pop("made_by") != MADE_BY:
            raise ValueError("made by another program")
        tree.pop("for")
        return Mark(**tree | {"kind": FolderKind[tree["kind"].upper()], "namespace": PidNamespace(**tree["namespace"])})


@dataclass
class OwnedFolder:
    """Holds the lock of a folder that this process made, until `release` or `remove`."""

    path: Path
    mark: Mark
    _lock: int = field(repr=False)

    @staticmethod
    def make(path: Path, kind: FolderKind, token: str | None = None, mode: int = PRIVATE) -> OwnedFolder:
        """Make the folder, with the mode bits of `mode` less the umask, and its mark. Its parent must exist.

        An existing empty folder is used. Raises FileExistsError for any other, BlockingIOError if another process is
        making it at this moment, and OSError.
        """
        try:
            path.mkdir(mode)
        except FileExistsError:
            if kind is FolderKind.SESSION or not is_free(path):  # a session's name is new each time
                raise
        try:
            try:
                return OwnedFolder.mark_existing(path, kind, token)
            except FileNotFoundError:  # it looked like what a kill leaves, and another process has just deleted it
                path.mkdir(mode)
                return OwnedFolder.mark_existing(path, kind, token)
        except OSError:
            with suppress(OSError):  # not empty: another process is making it
                path.rmdir()
            raise

    @staticmethod
    def mark_existing(path: Path, kind: FolderKind, token: str | None = None) -> OwnedFolder:
        """Write the mark into a folder that has none. Raises as `make`."""
        lock = os.open(path / MARK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_size:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path / MARK_NAME))
            mark = Mark.of_this_process(path, kind, token)
            try:
                os.write(lock, mark.to_json().encode())
                os.fsync(lock)
                sync(path)
            except OSError:
                (path / MARK_NAME).unlink()  # half a mark would make every later attempt fail
                raise
        except OSError:
            os.close(lock)
            raise
        return OwnedFolder(path, mark, lock)

    def release(self) -> None:
        """Release the lock. The folder and its mark stay."""
        os.close(self._lock)

    def remove(self) -> None:
        """Delete the folder and release the lock. Anything that cannot be deleted stays."""
        try:
            with suppress(OSError, NotOwnedError), _opened(self.path) as fd:
                if os.path.samestat(os.stat(MARK_NAME, dir_fd=fd, follow_symlinks=False), os.fstat(self._lock)):
                    _delete(self.path, fd)
        finally:
            self.release()


def is_free(path: Path) -> bool:
    """Return whether a new folder can be made at `path`: nothing is there, or an empty folder of this user's.

    A folder that a killed process left before it wrote the mark counts as empty.
    """
    if path.is_symlink() or not path.is_dir():
        return not os.path.lexists(path)
    mark = path / MARK_NAME
    is_unmarked = not os.path.lexists(mark) or not mark.lstat().st_size
    return is_unmarked and {file.name for file in path.iterdir()} <= {MARK_NAME} and path.stat().st_uid == os.geteuid()


def read_mark(path: Path) -> Mark | None:
    """Return the mark of a folder, whoever wrote it, or None if it has none. `path` may be a link to the folder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(fd)
    except NO_MARK:
        return None
    finally:
        os.close(fd)


def has_mark(path: Path, *kinds: FolderKind) -> bool:
    """Return whether `path` is a folder, and no link to one, with a mark of one of `kinds`; without kinds, of any."""
    mark = None if path.is_symlink() else read_mark(path)
    return mark is not None and mark.kind in (kinds or FolderKind)


def remove_owned(path: Path, kind: FolderKind, *, token: str | None = None) -> None:
    """Delete a folder that this program made for `kind` and that no process uses any more.

    path: no link. The way to its parent may lead over links, which are the user's.
    token: deletes only a folder whose mark has this token, that is, only one owner's folders.

    Raises NotOwnedError naming the reason if the folder must stay, OSError if it cannot be deleted.
    """
    with _opened(path) as fd:
        _check(path, fd, kind, token)
        lock = os.open(MARK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=fd)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(path, fd)
        except BlockingIOError:
            raise FolderInUseError(f"{path} is not deleted: another process uses it") from None
        finally:
            os.close(lock)


def why_not_owned(path: Path, kind: FolderKind, *, token: str | None = None) -> str | None:
    """Return why `remove_owned` would not delete a folder; None if it would, unless a process uses it then."""
    try:
        with _opened(path) as fd:
            _check(path, fd, kind, token)
    except (NotOwnedError, OSError) as error:
        return str(error)
    return None


def _check(path: Path, fd: int, kind: FolderKind, token: str | None) -> None:
    """Raise NotOwnedError unless the mark of an open folder allows its deletion."""
    try:
        mark = _read(fd)
        owners = {mark.uid, os.fstat(fd).st_uid, os.stat(MARK_NAME, dir_fd=fd, follow_symlinks=False).st_uid}
    except NO_MARK:
        raise _kept(path, f"it has no mark ({MARK_NAME}) that this program made it") from None
    if owners != {os.geteuid()}:
        raise _kept(path, "it belongs to another user")
    if mark.kind is not kind:
        raise _kept(path, f"its mark ({MARK_NAME}) says that it is {mark.kind.value}")
    if mark.inode != os.fstat(fd).st_ino:
        raise _kept(path, "it is a copy of what this program made")
    if token is not None and mark.token != token:
        raise _kept(path, "another run made it")
    if kind not in GUARDED and mark.maker_lives and not mark.is_of_this_process:
        raise FolderInUseError(f"{path} is not deleted: process {mark.pid}, which made it, still runs")


def _kept(path: Path, reason: str) -> NotOwnedError:
    return NotOwnedError(f"{path} is not deleted: {reason}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the folder `path`, which may be no link, and yield its descriptor. Raises NotOwnedError, OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _kept(path, f"{path.name} is a link or no folder") from None
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int) -> Mark:
    """Read the mark of an open folder. Raises OSError and what `Mark.from_json` raises."""
    file = os.open(MARK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("no file")
        return Mark.from_json(os.read(file, MARK_BYTES))
    finally:
        os.close(file)


def _delete(path: Path, fd: int) -> None:
    """Delete an open folder, its mark last, so that a folder that is left half deleted still has it."""
    for name in os.listdir(fd):
        if name != MARK_NAME:
            _delete_entry(name, fd)
    os.unlink(MARK_NAME, dir_fd=fd)
    path.rmdir()


def _delete_entry(name: str, fd: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=fd)  # follows no links
    else:
        os.unlink(name, dir_fd=fd)
