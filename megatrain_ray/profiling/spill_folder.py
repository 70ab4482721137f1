"""Checks the folder of spill.path on one host: whether it can be written to, and on which file system it is.

The arena owners of other hosts check it as well, so this module does not import PyTorch.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.storage.kvikio_store import unusable
from megatrain_ray.machine.proc_files import read_text

IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose files are host memory


@dataclass(frozen=True)
class OtherHost:
    """Checks the spill folder of a host other than the driver's.

    name: name of the host for messages.
    folder: spill folder; None if nothing spills.
    by_kvikio: whether kvikio reads and writes the files.
    """

    name: str
    folder: Path | None
    by_kvikio: bool

    def check(self) -> None:
        """Check the folder on that host as the driver does on its own. Raises ConfigError if it cannot be used."""
        if self.folder is None:
            return
        check_folder(self.folder, make=True, where=f" on {self.name}")
        if self.by_kvikio and (reason := unusable(self.folder)) is not None:
            raise ConfigError(
                f"spill.io: kvikio does not work for {self.folder} on {self.name}: {reason}; it does on the driver's "
                "host, and hosts must be alike: set spill.io to posix"
            )


def check_folder(folder: Path, *, make: bool, where: str = "") -> bool:
    """Check the folder, and return whether it exists.

    make: create the folder if it does not exist.
    where: addition to messages.

    Raises ConfigError if it is no folder or cannot be written to.
    """
    try:
        if not nearest(folder).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if is_here := folder.is_dir():
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        advice = "name a folder on a local NVMe drive that can be written to"
        raise ConfigError(f"spill.path: cannot write to {folder}{where}: {error.strerror}; {advice}") from None
    return is_here


def memory_warning(folder: Path, where: str = "") -> str | None:
    """Return a warning if the folder's file system keeps files in memory; None otherwise."""
    if (kind := _memory_file_system(folder)) is None:
        return None
    return (
        f"spill.path: {folder}{where} is on {kind}, which is host memory: what spills there comes on top of what the "
        "plan counts; name a folder on a local NVMe drive, or lower hardware.ram_limit by what spills"
    )


def _memory_file_system(folder: Path) -> str | None:
    """Return the type of the folder's file system if it keeps files in memory; None otherwise."""
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in read_text(Path("/proc/self/mountinfo")).splitlines():
        mounted, _, kind = line.partition(" - ")
        if mounted.split()[2] == name and kind.split()[0] in IN_MEMORY:
            return kind.split()[0]
    return None


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
