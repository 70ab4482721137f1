"""What a plan has its device made with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.workers import open_device
from tests.support.shapes import qwen

LIMIT = 16 << 30
MACHINE = Machine("cuda", num_cpus=8, num_nodes=1, ram_bytes=1 << 40, hbm_bytes=LIMIT, profile=TYPICAL_GPU)


@pytest.mark.parametrize(("changes", "beside"), [({}, 0), ({"num_gpus": 2}, 1), ({"num_gpus": 2, "num_hosts": 2}, 2)])
def test_a_device_leaves_what_nccl_takes_beside_it(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], beside: int
) -> None:
    """One communicator for sums, and one for all-gathers, of 1 GiB each."""
    monkeypatch.setattr(open_device, "CudaDevice", SimpleNamespace)
    structure, activations = qwen(3, 64, hidden=256, heads=4, kv_heads=2, inner=576)
    plan = make_plan(structure, activations, MACHINE, Request(Precision.BF16, False, True, 1, 2, 64, **changes))
    made = open_device.make_device(plan, deterministic=False)
    assert made.memory_bytes == LIMIT - (beside << 30)  # type: ignore[attr-defined]
    bytes_of = {row.name: row.num_bytes for row in plan.memory_items if row.tier is Tier.HBM}
    between = bytes_of.pop("allocator")
    again = "boundary activations", "kept activations", "attention masks", "work"
    assert between == sum(bytes_of[name] for name in again) // 32
    unlimited = open_device.make_device(replace(plan, limits=replace(plan.limits, hbm_bytes=None)), deterministic=False)
    assert unlimited.memory_bytes is None  # type: ignore[attr-defined]
