"""Packing whose memory is what does not fit is given up where it was chosen, and named where it was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.planner.search.make_plan import make_plan, plan_with_compression
from megatrain_ray.errors import CapacityError
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay
from tests.engine.planner.memory.test_plan_spill import CUDA, DISK, REQUEST, planned, shape

PACKED = replace(DISK, bytes_per_s=4e9, way=DiskWay(DiskIo.KVIKIO, packed=True), plain_bytes_per_s=3e9)
CHOSEN = replace(PACKED, may_be_unpacked=True)
ENOUGH = planned(1 << 40).total_bytes(Tier.HOST)  # with all on disk, and nothing packed


def made(machine: Machine) -> Plan:
    return plan_with_compression(*shape(), machine, REQUEST)


def test_what_was_chosen_is_given_up() -> None:
    short = replace(CUDA, ram_bytes=ENOUGH)
    with pytest.raises(CapacityError):
        make_plan(*shape(), replace(short, spill=CHOSEN), REQUEST)
    plan = made(replace(short, spill=CHOSEN))
    assert plan == make_plan(*shape(), replace(short, spill=replace(DISK, way=DiskWay(DiskIo.KVIKIO))), REQUEST)
    assert plan.uses_disk and not plan.disk.packed
    assert plan.prediction and plan.prediction.profile and plan.prediction.profile.disk_bytes_per_s == 3e9


def test_it_is_kept_where_there_is_room() -> None:
    enough = replace(CUDA, ram_bytes=ENOUGH + (1 << 30), spill=CHOSEN)
    plan = made(enough)
    assert plan.disk.packed and plan == make_plan(*shape(), enough, REQUEST)


def test_what_was_asked_for_is_named() -> None:
    with pytest.raises(CapacityError) as info:
        made(replace(CUDA, ram_bytes=ENOUGH, spill=PACKED))
    takes = "spill.compression: zstd takes up to 96.00 MiB of host memory for each optimizer shard"
    assert str(info.value).startswith(takes)
    assert "it fits with spill.compression=none, or auto. With zstd it needs " in str(info.value)
    assert " of host RAM, " in str(info.value)


@pytest.mark.parametrize("spill", [PACKED, CHOSEN, DISK])
def test_what_does_not_fit_without_it_either_is_not_its_fault(spill: object) -> None:
    with pytest.raises(CapacityError, match=r"^needs ") as info:
        made(replace(CUDA, ram_bytes=ENOUGH // 4, spill=spill))
    assert "spill.compression" not in str(info.value)
