"""Finds what the planner needs to know of the disk of spill.path: free space, rate, and the method of access.

The rate is that of the hardware profile if it has one. Otherwise it is measured once for each method that works, and
kept in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.config.groups import SpillConfig
from megatrain_ray.console.logs import say
from megatrain_ray.engine.device.hardware_profile import TYPICAL_DISK_BYTES_PER_S, HardwareProfile, Rate
from megatrain_ray.engine.planner.request import ANY_ROOM, Machine, SpillSpace
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.io.files.disk_errors import free_bytes
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay
from megatrain_ray.io.storage.disk_rate import measure_mixed
from megatrain_ray.io.storage.kvikio_store import unusable
from megatrain_ray.profiling.profiles import keep
from megatrain_ray.profiling.spill_folder import check_folder, memory_warning, nearest

log = logging.getLogger(__name__)

PROBE_BYTES = 512 << 20  # bytes that are read, and as many written
MARGIN_BYTES = 1 << 30  # free space that is never used
GAIN = 1.05  # factor by which a method must be faster than a simpler one: single measurements vary by as much


@dataclass(frozen=True)
class DiskRate:
    """Holds the rates of a disk as the cache keeps them.

    device: st_dev of the file system that holds `folder`.
    bytes_per_s: rate of each method that was measured, by its name.
    """

    version: Literal[2]
    folder: str
    device: int
    bytes_per_s: dict[str, Rate]


_DISK_RATE = TypeAdapter(DiskRate)


def with_spill(machine: Machine, spill: SpillConfig, *, imagined: bool = False) -> Machine:
    """Return the machine with its spill space, if spill.path is set. The folder is created.

    machine: machine with its profile.
    imagined: for a plan without a run. A missing folder is not created, and its disk is taken to have unlimited space.

    Raises ConfigError if the path is no folder or cannot be written to, or if kvikio is set and does not work.
    """
    if spill.path is None:
        return machine
    folder = Path(spill.path).absolute()
    is_here = check_folder(folder, make=not imagined)
    if is_here and (warning := memory_warning(folder)):
        log.warning("%s", warning)
    limit_bytes = spill.limit or ANY_ROOM
    if is_here:
        limit_bytes = min(limit_bytes, max(0, free_bytes(folder) - MARGIN_BYTES))
    usable = _usable_ways(folder, spill) if is_here else (_requested_way(spill),)
    if machine.profile and machine.profile.disk_bytes_per_s:
        rates = _rates_of_profile(machine.profile, usable[0])
    else:
        rates = _cached_rates(folder)
        # Activations are never compressed, so the method without compression is measured as well.
        needed = tuple(dict.fromkeys(each for way in usable for each in (_plain(way), way)))
        if is_here and limit_bytes and not {str(way) for way in needed} <= rates.keys():
            rates = _measure_rates(folder, needed)
    return replace(machine, spill=_spill_space(limit_bytes, usable, rates))


def rate_file(folder: Path) -> Path:
    """Return the path of the kept rate of a folder's disk. Raises RuntimeError if there is no cache."""
    key = hashlib.sha256(f"{_device_of(folder)} {folder}".encode()).hexdigest()[:12]
    return cache_folder() / "disks" / f"{key}.json"


def forget_rates() -> None:
    """Delete the measured rates, so that the next run that spills measures its disk again."""
    with suppress(RuntimeError):  # there is no cache
        for file in (cache_folder() / "disks").glob("*.json"):
            with suppress(OSError, ValidationError):  # files that are no records of ours stay
                _DISK_RATE.validate_json(file.read_bytes())
                file.unlink()


def _requested_way(spill: SpillConfig) -> DiskWay:
    """Return the method that the settings name; the simplest one if they say auto."""
    return DiskWay(DiskIo.POSIX if spill.io == "auto" else DiskIo(spill.io), spill.compression == "zstd")


def _usable_ways(folder: Path, spill: SpillConfig) -> tuple[DiskWay, ...]:
    """Return the methods that may be chosen for the folder, simplest first.

    Raises ConfigError if kvikio is set and does not work.
    """
    requested = _requested_way(spill)
    packed = (False, True) if spill.compression == "auto" else (requested.packed,)
    return tuple(itertools.starmap(DiskWay, itertools.product(_usable_io(folder, spill.io, requested.io), packed)))


def _usable_io(folder: Path, io: str, requested: DiskIo) -> tuple[DiskIo, ...]:
    if io == "posix" or (io == "auto" and importlib.util.find_spec("kvikio") is None):
        return (requested,)
    if (reason := unusable(folder)) is None:
        return (requested, DiskIo.KVIKIO) if io == "auto" else (requested,)
    if io == "kvikio":
        raise ConfigError(
            f"spill.io: kvikio does not work for {folder}: {reason}; docs/hardware_profile.md says what it needs, auto "
            "and posix do without"
        )
    log.warning("kvikio is installed and not used for spill.path: %s", reason)
    return (requested,)


def _plain(way: DiskWay) -> DiskWay:
    """Return the method for activations, which are never compressed, if everything else uses `way`."""
    return way._replace(packed=False)


def _rates_of_profile(profile: HardwareProfile, simplest: DiskWay) -> Mapping[str, float]:
    """Return the rates of the profile by method: of the simplest one, or of that without and with compression."""
    rate, plain = profile.disk_bytes_per_s or 0.0, profile.disk_plain_bytes_per_s
    if plain is None:
        return {str(simplest): rate}
    return {str(_plain(simplest)): plain, str(simplest._replace(packed=True)): rate}


def _spill_space(limit_bytes: int, usable: Sequence[DiskWay], rates: Mapping[str, float]) -> SpillSpace:
    rate, way = _fastest(usable, rates)
    if not way.packed:
        return SpillSpace(limit_bytes, rate, way)
    return SpillSpace(limit_bytes, rate, way, rates.get(str(_plain(way))), _plain(way) in usable)


def _fastest(usable: Sequence[DiskWay], rates: Mapping[str, float]) -> tuple[float, DiskWay]:
    """Return the rate in bytes per second of the fastest method, and the method.

    If nothing was measured, that is the simplest method at a typical rate.
    """
    best_rate, best = 0.0, usable[0]
    for way in usable:
        rate = rates.get(str(way), 0.0)
        if rate > best_rate * GAIN:
            best_rate, best = rate, way
    return best_rate or TYPICAL_DISK_BYTES_PER_S, best


def _cached_rates(folder: Path) -> Mapping[str, float]:
    """Return the rates in the cache; none if nothing was measured or the file is damaged."""
    try:
        return _DISK_RATE.validate_json(rate_file(folder).read_bytes()).bytes_per_s
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValidationError) as error:
        log.warning("what was measured of the disk of spill.path is left out: %s", error)
    return {}


def _measure_rates(folder: Path, ways: Sequence[DiskWay]) -> Mapping[str, float]:
    """Measure the disk with all these methods and keep the result.

    A failed measurement is logged and does not prevent the training; the result then has no rates.
    """
    try:
        rates = {str(way): measure_mixed(folder, PROBE_BYTES, way) for way in ways}
    except MegatrainError as error:
        log.warning("spill.path is taken to be on a typical NVMe drive: %s", error)
        return {}
    by = ", ".join(f"{rate / 1e9:.2f} GB/s by {way}" for way, rate in rates.items())
    say(f"measured the disk of {folder}, which is done once: {by}, read and written at the same time")
    found = DiskRate(2, str(folder), _device_of(folder), rates)
    keep(lambda: rate_file(folder), _DISK_RATE.dump_json(found).decode())
    return rates


def _device_of(folder: Path) -> int:
    return nearest(folder).stat().st_dev
