"""Activations on disk in plans: where the host has no room for them and a step is faster for it, as few as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.measure.plan_traffic import moved_bytes
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.plan.activation_moves import away, is_on_disk
from megatrain_ray.engine.plan.activation_staging import MOST_BUFFERS
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.plan.spill_layout import BLOCK_BYTES
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.op_costs import Prices
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.limits import fits, spare_ram
from megatrain_ray.engine.planner.memory.host_bytes import host_memory_items
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Candidate, Machine, SpillSpace
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.engine.planner.search.search_results import TIE
from megatrain_ray.errors import CapacityError
from megatrain_ray.io.storage.disk_io import DiskWay
from megatrain_ray.virtual_clock import Op, Stage
from megatrain_ray.workers.arenas import activations_file, spill_files
from tests.engine.planner.memory.test_plan_offload import MACHINE, NUM_BLOCKS, REQUEST, offloading, row, shape, step_s
from tests.support.candidate_plans import build_plan

DISK = SpillSpace(1 << 40, 2e10)  # so small a model computes for no longer than one that is faster than any takes
SHORT = replace(MACHINE, ram_bytes=5 << 30)
CANDIDATE = offloading(1)._replace(boundaries=Tier.HOST, spills_activations=True)


def moving(plan: Plan) -> list[bool]:
    """Return whether activations are on disk, for each kind that waits elsewhere, in the order of the layers."""
    return [is_on_disk(layer, kind) for layer in plan.layers for kind in away(layer)]


def planned(ram_bytes: int, candidate: Candidate = CANDIDATE, disk: SpillSpace = DISK, **changes: int) -> Plan:
    """Return the plan of one candidate."""
    machine = replace(MACHINE, ram_bytes=ram_bytes, spill=disk)
    return build_plan(*shape(), machine, replace(REQUEST, **changes), candidate)


def needed_bytes(candidate: Candidate = CANDIDATE, **changes: int) -> int:
    """Host memory with nothing on disk."""
    plan = planned(1 << 50, candidate, **changes)
    return plan.limits.ram_bytes - spare_ram(plan)


def test_what_the_host_has_no_room_for_goes_to_the_disk_where_that_is_faster() -> None:
    structure, _ = shape()
    without, plan = make_plan(*shape(), SHORT, REQUEST), make_plan(*shape(), replace(SHORT, spill=DISK), REQUEST)
    assert fits(plan)
    assert plan.disk_activations and not plan.uses_disk
    assert step_s(plan) < (1 - TIE) * step_s(without)
    assert (plan.disk.extent_elements, plan.disk.num_state_slots) == (0, 0)
    assert (plan.disk.num_staging_buffers, plan.disk.staging_buffer_bytes) == (MOST_BUFFERS, BLOCK_BYTES)
    assert moved_bytes(plan, structure)["disk"] == 2 * sum(plan.disk_activations)
    entering = sum(layer.boundary is Tier.NVME for layer in plan.layers)
    keeping = sum(layer.kept is Tier.NVME for layer in plan.layers)
    kinds = {"boundary activations": entering, "kept activations": keeping}
    what = " and ".join(f"{kind} of {count} layers" for kind, count in kinds.items() if count)
    assert f"\nspill     on disk: {what}; " in describe(plan)
    assert Plan.from_json(plan.to_json()) == plan
    (name,) = spill_files(plan, structure.layout(), "/nvme")
    assert name == activations_file(0)
    assert spill_files(plan, structure.layout(), "/nvme")[name].nbytes == plan.total_bytes(Tier.NVME)


def test_how_fast_others_are_packed_makes_no_difference_to_them() -> None:
    """They go to the disk by its rate without, and nothing is said of packing where they alone are there."""
    packing = DiskWay(packed=True)
    slow, fast = SpillSpace(1 << 40, 2e10, packing, 3e8), SpillSpace(1 << 40, 3e9, packing, DISK.bytes_per_s)
    in_memory, on_disk = (make_plan(*shape(), replace(SHORT, spill=disk), REQUEST) for disk in (slow, fast))
    assert not in_memory.disk_activations
    assert on_disk.layers == make_plan(*shape(), replace(SHORT, spill=DISK), REQUEST).layers
    assert on_disk.disk_activations and not on_disk.uses_disk
    assert "zstd" not in describe(on_disk)


def test_where_the_host_has_room_or_the_disk_is_slow_nothing_goes_there() -> None:
    """Except for the disk the plan is the same."""
    for machine, disk in ((replace(MACHINE, ram_bytes=256 << 30), DISK), (SHORT, SpillSpace(1 << 40, 3e8))):
        with_disk = make_plan(*shape(), replace(machine, spill=disk), REQUEST)
        without = make_plan(*shape(), machine, REQUEST)
        assert with_disk.prediction and without.prediction
        rates = replace(without.prediction, profile=with_disk.prediction.profile)
        assert with_disk == replace(
            without, prediction=rates, limits=replace(without.limits, spill_bytes=disk.limit_bytes)
        )
        assert (with_disk.disk.num_staging_buffers, with_disk.disk.staging_buffer_bytes) == (0, 0)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("order", LoopOrder)
def test_as_few_go_as_it_takes_the_first_layers_first(order: LoopOrder, num_micro_batches: int) -> None:
    """They have the most time until they come back."""
    candidate, layout = CANDIDATE._replace(order=order), shape()[0].layout()
    needed = needed_bytes(candidate, num_micro_batches=num_micro_batches)
    most = planned(needed, candidate, num_micro_batches=num_micro_batches).host_activation_bytes
    counts = []
    for missing in range(0, most - (300 << 20), most // 20):
        plan = planned(needed - missing, candidate, DISK, num_micro_batches=num_micro_batches)
        assert spare_ram(plan) >= 0
        on_disk = moving(plan)
        counts.append(sum(on_disk))
        assert on_disk == sorted(on_disk, reverse=True)
        assert not plan.uses_disk, "state stays where it is as long as activations are enough"
        if counts[-1] > 1:
            last = max(i for i, layer in enumerate(plan.layers) if layer.disk_activations)
            layers = list(plan.layers)
            kind = "kept" if layers[last].kept is Tier.NVME else "boundary"
            layers[last] = replace(layers[last], **{kind: Tier.HOST})
            fewer = replace(plan, layers=tuple(layers))
            assert sum(r.num_bytes for r in host_memory_items(fewer, layout)) > plan.limits.ram_bytes
    assert counts[0] == 0
    assert all(fewer <= more for fewer, more in pairwise(counts))
    assert len(set(counts)) > 4


def test_the_arithmetic_counts_windows_files_and_every_sweep() -> None:
    several = {"num_micro_batches": 3}
    for order, live in ((LoopOrder.LAYERS_OUTER, 3), (LoopOrder.MICRO_BATCHES_OUTER, 1)):
        candidate = CANDIDATE._replace(order=order)
        plan = planned(needed_bytes(candidate, **several) - (1 << 30), candidate, **several)
        assert len(plan.disk_activations) == live * sum(moving(plan))
        assert row(plan, Tier.NVME, "activations") == plan.activation_file_bytes == sum(plan.disk_activations)
        windows = row(plan, Tier.HOST, "activation windows")
        assert windows == MOST_BUFFERS * BLOCK_BYTES + 8 * sum(-(-b // BLOCK_BYTES) for b in plan.disk_activations)
        kept = live * sum(layer.kept_bytes for layer in plan.layers if layer.kept is Tier.HOST)
        assert row(plan, Tier.HOST, "kept activations") == plan.host_kept_bytes == kept
        assert plan.written_bytes == 3 // live * sum(plan.disk_activations)


def test_each_gpu_of_a_host_has_windows_and_a_file_and_they_share_the_disk() -> None:
    structure, activations = shape()
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, 0, DISK.bytes_per_s)
    one, *others = (
        planned(needed_bytes(num_gpus=n * k, num_hosts=k) - n * (1 << 30), disk=DISK, num_gpus=n * k, num_hosts=k)
        for n, k in ((1, 1), (3, 1), (3, 2))
    )
    op = Op("boundary", 1, num_bytes=1 << 30)
    for three in others:
        assert three.hosts.gpus_per_host == 3
        assert three.layers == one.layers
        for tier, name in ((Tier.NVME, "activations"), (Tier.HOST, "activation windows")):
            assert row(three, tier, name) == 3 * row(one, tier, name)
        assert row(three, Tier.HBM, "boundary activations") == row(one, Tier.HBM, "boundary activations")
        assert three.written_bytes == 3 * one.written_bytes == three.total_bytes(Tier.NVME)
        assert moved_bytes(three, structure)["disk"] == three.hosts.num_gpus * moved_bytes(one, structure)["disk"]
        files = spill_files(three, structure.layout(), "/nvme")
        assert {name: file.nbytes for name, file in files.items()} == {
            activations_file(k): one.activation_file_bytes for k in range(3)
        }
        of_three, of_one = (Prices(plan, basis, activations)(Stage.DISK, op) for plan in (three, one))
        assert of_three == pytest.approx(3 * of_one)
        of_three, of_one = (Bounds(plan, basis, activations).disk_s for plan in (three, one))
        assert of_three == pytest.approx(3 * of_one)
        assert spare_ram(three) >= 0


def test_the_device_holds_what_passes_wherever_it_waits() -> None:
    on_host, on_disk = planned(needed_bytes()), planned(needed_bytes() - (2 << 30))
    assert on_disk.disk_activations
    for name in ("boundary activations", "kept activations"):
        assert row(on_disk, Tier.HBM, name) == row(on_host, Tier.HBM, name)


def test_a_disk_without_room_is_refused_with_the_arithmetic() -> None:
    """The disk is refused where nothing else fits: state on disk is the least."""
    machine = replace(MACHINE, spill=SpillSpace(1 << 20, 3e9))
    with pytest.raises(CapacityError, match=r"of disk, 1\.00 MiB available: raise spill\.limit"):
        make_plan(*shape(), replace(machine, ram_bytes=4 << 30), replace(REQUEST, hbm_layers=0))


def drafts(machine: Machine, num_micro_batches: int) -> Iterator[Plan]:
    request = replace(REQUEST, num_micro_batches=num_micro_batches)
    for order in LoopOrder if num_micro_batches > 1 else [LoopOrder.MICRO_BATCHES_OUTER]:
        for num_tail_blocks in range(NUM_BLOCKS + 1):
            yield build_plan(
                *shape(), machine, request, CANDIDATE._replace(order=order, num_tail_blocks=num_tail_blocks)
            )


@pytest.mark.parametrize("bytes_per_s", [3e9, 3e7])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_no_plan_is_faster_than_its_bounds(bytes_per_s: float, num_micro_batches: int) -> None:
    """`bytes_per_s`: of what is not packed, which activations never are."""
    structure, activations = shape()
    rates = 10 * bytes_per_s, bytes_per_s
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, 0, *rates)
    tight = 0.0
    for plan in drafts(replace(SHORT, spill=DISK), num_micro_batches):
        predicted = predict(plan, basis, activations)
        bounds = Bounds(plan, basis, activations)
        moved = moved_bytes(plan, structure)["disk"]
        assert predicted.busy_s.get("disk", 0.0) * bytes_per_s == pytest.approx(moved, rel=1e-6)
        assert bounds.disk_s * bytes_per_s == pytest.approx(moved)
        most = max(bounds.compute_s + bounds.late_s, bounds.chained_s, bounds.h2d_s, bounds.disk_s)
        assert most <= predicted.step_s * (1 + 1e-9)
        tight = max(tight, bounds.disk_s / predicted.step_s)
    assert bytes_per_s > 1e9 or tight > 0.9


def test_a_faster_disk_is_never_slower() -> None:
    times = []
    for bytes_per_s in (1e9, 3e9, 6e9, 2e10):
        plan = make_plan(*shape(), replace(SHORT, spill=SpillSpace(1 << 40, bytes_per_s)), REQUEST)
        times.append(step_s(plan))
    assert all(later <= earlier * (1 + 2 * TIE) for earlier, later in pairwise(times))
    assert times[-1] < times[0]
