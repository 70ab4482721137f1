"""Makes folders of spill.path whose disks are not measured for real, and returns what a plan is told of them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.config.groups import SpillConfig
from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU
from megatrain_ray.engine.planner.request import Machine, SpillSpace
from megatrain_ray.io.storage.disk_io import PLAIN, DiskWay
from megatrain_ray.profiling import spill_disk
from megatrain_ray.profiling.spill_disk import PROBE_BYTES, with_spill

MACHINE = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
RATE, FREE = 2.5e9, 10 << 30


def imitated_disks(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[Path]:
    """Give all disks the same rate and room; return a list that fills with the folders whose disks are measured."""
    folders: list[Path] = []

    def measure(folder: Path, num_bytes: int, way: DiskWay) -> float:
        assert num_bytes == PROBE_BYTES
        assert folder.is_dir()
        if way == PLAIN:
            folders.append(folder)
        return RATE

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(spill_disk, "measure_mixed", measure)
    monkeypatch.setattr(spill_disk, "free_bytes", lambda folder: FREE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # kvikio is not installed
    return folders


def space(
    folder: Path, limit: int | str | None = None, *, imagined: bool = False, rate: float | None = None, **settings: str
) -> SpillSpace:
    """Return the space that a plan is told of. `rate`: that of the profile. `settings`: other keys of spill."""
    machine = MACHINE if rate is None else replace(MACHINE, profile=replace(TYPICAL_CPU, disk_bytes_per_s=rate))
    spill = SpillConfig.model_validate({"path": str(folder), "limit": limit, **settings})
    found = with_spill(machine, spill, imagined=imagined)
    assert replace(found, spill=None) == machine
    assert found.spill is not None
    return found.spill
