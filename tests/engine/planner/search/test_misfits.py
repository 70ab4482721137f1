"""What is said where nothing fits: the least that is missing, and settings that save it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.planner.limits import missing_bytes
from megatrain_ray.engine.planner.request import Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search.candidates import candidates
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import CapacityError
from megatrain_ray.units import parse_size
from tests.support.candidate_plans import build_plan
from tests.support.shapes import qwen

HBM, SEQUENCES = 12 << 30, 8
MACHINE = Machine("cuda", num_cpus=16, num_nodes=1, ram_bytes=1 << 40, hbm_bytes=HBM, profile=TYPICAL_GPU)
REQUEST = Request(Precision.BF16, False, True, 1, SEQUENCES, 1024, free_split=True, saves=False)


@cache
def shape() -> Any:
    return qwen(16, 1024, hidden=2048, heads=16, kv_heads=2, inner=8192)


def refusal(ram_bytes: int, **changes: Any) -> str | None:
    """Return the first line of the refusal, or None if the plan fits."""
    try:
        make_plan(*shape(), replace(MACHINE, ram_bytes=ram_bytes), replace(REQUEST, **changes))
    except CapacityError as error:
        return str(error).splitlines()[0]
    return None


def needed_ram(message: str) -> int:
    found = re.search(r"needs ([\d.]+) GiB of host RAM", message)
    assert found
    return int(float(found[1]) * (1 << 30))


def test_the_ram_that_is_named_is_what_is_needed() -> None:
    """It is right to the hundredth of a GiB, wherever sums and gradients wait, and with the device filled."""
    message = refusal(4 << 30)
    assert message and "within these limits" not in message
    needed, hundredth = needed_ram(message), (1 << 30) // 100
    assert refusal(needed - hundredth)
    assert refusal(needed + hundredth) is None
    structure, activations = shape()
    last = [*candidates(structure, replace(REQUEST, free_split=False))][-1]
    assert needed < build_plan(structure, activations, MACHINE, REQUEST, last).total_bytes(Tier.HOST) - (4 << 30)


def test_settings_that_save_what_is_missing_are_named() -> None:
    """The ones that change least: bf16 gradients of sums, no clipping, both."""
    message = refusal(4 << 30)
    assert message
    needed = needed_ram(message)
    least = {}
    for settings, changes in {
        "train.grad_dtype=bf16": {"round_gradients": True},
        "train.clip=null": {"clip": False},
        "train.grad_dtype=bf16 and train.clip=null": {"round_gradients": True, "clip": False},
    }.items():
        of_settings = refusal(4 << 30, **changes)
        assert of_settings
        least[settings] = needed_ram(of_settings)
    saving = min(needed - n for n in least.values() if n < needed)
    told = refusal(needed - saving // 2)
    assert told
    named = told.splitlines()[0].rpartition(", or with ")[2]
    assert least[named] < needed - saving // 2
    assert all(n > needed - saving // 2 for n in list(least.values())[: list(least).index(named)])


def test_a_disk_is_named_with_the_room_that_it_needs() -> None:
    structure, activations = shape()
    told = refusal(8 << 30)
    assert told
    found = re.search(r"within these limits it fits with a folder on NVMe with (\S+ \S+) of room as spill.path", told)
    assert found
    room = parse_size(found[1])
    with_disk = replace(MACHINE, ram_bytes=8 << 30, spill=SpillSpace(room + (16 << 20), 3e9))
    assert make_plan(structure, activations, with_disk, REQUEST).total_bytes(Tier.NVME) > 0
    less = replace(with_disk, spill=SpillSpace(room // 2, 3e9))
    with pytest.raises(CapacityError, match=r"^needs .* of disk, .* available: raise spill\.limit"):
        make_plan(structure, activations, less, REQUEST)


def test_missing_bytes_are_those_of_all_limits() -> None:
    structure, activations = shape()
    candidate = next(candidates(structure, REQUEST))
    plan = build_plan(structure, activations, MACHINE, REQUEST, candidate)
    hbm, host = plan.total_bytes(Tier.HBM), plan.total_bytes(Tier.HOST)
    assert missing_bytes(replace(plan, limits=replace(plan.limits, hbm_bytes=hbm, ram_bytes=host))) == 0
    assert missing_bytes(replace(plan, limits=replace(plan.limits, hbm_bytes=hbm - 5, ram_bytes=host - 7))) == 12
    assert missing_bytes(replace(plan, limits=replace(plan.limits, hbm_bytes=None, ram_bytes=host - 7))) == 7
    assert (
        missing_bytes(replace(plan, device="cpu", limits=replace(plan.limits, hbm_bytes=None, ram_bytes=host))) == hbm
    )


def test_too_little_device_memory_is_named_first() -> None:
    with pytest.raises(CapacityError, match=r"^needs .* of device memory, 64\.00 MiB available: raise hardware\.hbm"):
        make_plan(*shape(), replace(MACHINE, hbm_bytes=64 << 20), REQUEST)
