"""What a plan is told of the disk of spill.path: how much may be there, and how fast it is.

The rate is that of the hardware profile where it has one. Otherwise it is measured once and kept in the cache.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.atomic_file import write_atomically
from megatrain_ray.config import SpillConfig
from megatrain_ray.engine.hardware_profile import TYPICAL_DISK_BYTES_PER_S, Rate
from megatrain_ray.engine.plan_request import Machine, SpillSpace
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.cache_folder import cache_folder
from megatrain_ray.io.disk_errors import free_bytes
from megatrain_ray.io.disk_rate import measure_mixed
from megatrain_ray.logs import say

log = logging.getLogger(__name__)

PROBE_BYTES = 512 << 20  # each way
MARGIN_BYTES = 1 << 30  # of what is free that stays free
ANY_ROOM = 1 << 60  # bytes of a disk that is not here


@dataclass(frozen=True)
class DiskRate:
    """What the cache keeps. `device`: st_dev of the file system that `folder` is on."""

    version: Literal[1]
    folder: str
    device: int
    bytes_per_s: Rate


_DISK_RATE = TypeAdapter(DiskRate)


def with_spill(machine: Machine, spill: SpillConfig, *, imagined: bool = False) -> Machine:
    """The machine, which has its profile, with what may be spilled where `spill.path` is set. Makes that folder.

    `imagined`: for a plan alone; a folder that is not here is not made, and its disk has any room. Raises ConfigError
    for a path that is no folder or cannot be written to.
    """
    if spill.path is None:
        return machine
    folder = Path(spill.path).absolute()
    is_here = _check(folder, make=not imagined)
    limit_bytes = spill.limit or ANY_ROOM
    if is_here:
        limit_bytes = min(limit_bytes, max(0, free_bytes(folder) - MARGIN_BYTES))
    known = (machine.profile and machine.profile.disk_bytes_per_s) or _kept(folder)
    if known is None and is_here and limit_bytes:
        known = _measured(folder)
    return replace(machine, spill=SpillSpace(limit_bytes, known or TYPICAL_DISK_BYTES_PER_S))


def rate_file(folder: Path) -> Path:
    """Where the rate of the disk of a folder is kept. Raises RuntimeError where there is no cache."""
    key = hashlib.sha256(f"{_device_of(folder)} {folder}".encode()).hexdigest()[:12]
    return cache_folder() / "disks" / f"{key}.json"


def forget_rates() -> None:
    """The next run that spills measures its disk again."""
    with suppress(RuntimeError):  # there is no cache
        for file in (cache_folder() / "disks").glob("*.json"):
            file.unlink(missing_ok=True)


def _check(folder: Path, *, make: bool) -> bool:
    """Whether it is here, which it is when it was to be made. Raises ConfigError."""
    try:
        if not _nearest(folder).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if is_here := folder.is_dir():
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        advice = "name a folder on a local NVMe drive that can be written to"
        raise ConfigError(f"spill.path: cannot write to {folder}: {error.strerror}; {advice}") from None
    return is_here


def _kept(folder: Path) -> float | None:
    """None where nothing was measured, or what is kept is damaged."""
    try:
        return _DISK_RATE.validate_json(rate_file(folder).read_bytes()).bytes_per_s
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValidationError) as error:
        log.warning("what was measured of the disk of spill.path is left out: %s", error)
        return None


def _measured(folder: Path) -> float | None:
    """None where it cannot be measured, which is no reason not to train."""
    try:
        rate = measure_mixed(folder, PROBE_BYTES)
    except MegatrainError as error:
        log.warning("spill.path is taken to be on a typical NVMe drive: %s", error)
        return None
    say(f"measured the disk of {folder}, which is done once: {rate / 1e9:.2f} GB/s, read and written at the same time")
    try:
        file = rate_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, _DISK_RATE.dump_json(DiskRate(1, str(folder), _device_of(folder), rate)).decode())
    except (OSError, RuntimeError, MegatrainError) as error:
        log.warning("what was measured is not kept: %s", error)
    return rate


def _device_of(folder: Path) -> int:
    return _nearest(folder).stat().st_dev


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
