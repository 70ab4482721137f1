"""State that is on disk: none where host memory has room, else of as few layers as it takes; its bytes and its time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.parameter_rules import ALL_ALIKE, ParameterRules
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.plan_shards import shard_layout, spill_layout
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.op_costs import Prices
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.cost.simulate_step import Simulation
from megatrain_ray.engine.planner.limits import fits, spare_ram
from megatrain_ray.engine.planner.memory.host_bytes import host_memory_items
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Candidate, Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search.fill_device import FILLED_SHARE
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.engine.planner.search.search_results import TIE
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS
from megatrain_ray.errors import CapacityError
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.units import format_bytes
from megatrain_ray.workers.arenas import WORKING, arena_sizes, spill_files, state_arena
from tests.support.candidate_plans import build_plan
from tests.support.shapes import deepened, qwen

BLOCKS, HEAD = 12, 13  # the embedding is layer 0
DISK = SpillSpace(limit_bytes=1 << 40, bytes_per_s=3e9)
CUDA = Machine("cuda", 16, 1, ram_bytes=1 << 40, hbm_bytes=8 << 30, profile=TYPICAL_GPU, spill=DISK)
CPU = replace(CUDA, device="cpu", hbm_bytes=None)
REQUEST = Request(Precision.BF16, False, True, 1, 4, 512, hbm_layers=0, saves=False)
CANDIDATE = Candidate(LoopOrder.LAYERS_OUTER, ActivationPolicy.KEEP, num_block_slots=3, num_edge_slots=2)


@cache
def shape(rules: ParameterRules = ALL_ALIKE) -> tuple[ModelStructure, ActivationBytes]:
    """Blocks of 17M parameters, ends of 4M."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, vocab_size=4096,
        tie_word_embeddings=False,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return deepened(*discover(factory, torch.bfloat16, 1, REQUEST.seq_len, rules), BLOCKS)


def planned(
    missing: int,
    machine: Machine = CUDA,
    rules: ParameterRules = ALL_ALIKE,
    on_device: int = 0,
    order: LoopOrder = LoopOrder.LAYERS_OUTER,
    **changes: Any,
) -> Plan:
    """Return the plan of one candidate, with `missing` bytes less on the host than it takes with nothing on disk."""
    candidate = CANDIDATE._replace(order=order, hbm_layers=frozenset(range(on_device)))
    request = replace(REQUEST, **changes)
    needed = -spare_ram(build_plan(*shape(rules), replace(machine, ram_bytes=0, spill=None), request, candidate))
    return build_plan(*shape(rules), replace(machine, ram_bytes=needed - missing), request, candidate)


def chosen(machine: Machine, **changes: Any) -> Plan:
    return make_plan(*shape(), machine, replace(REQUEST, **changes))


def needed_ram(machine: Machine, **changes: Any) -> int:
    """Return the host memory of the plan that is chosen if there is any amount."""
    return machine.ram_bytes - spare_ram(chosen(replace(machine, spill=None), **changes))


def state_bytes(layer: int) -> int:
    return 10 * shape()[0].layout().layers[layer].trained.size


def gradient_bytes(plan: Plan, layer: int) -> int:
    return plan.gradients.offload_dtype.itemsize * shape()[0].layout().layers[layer].trained.size


STEPS = range(0, 10 * state_bytes(1), state_bytes(1) // 3)


@pytest.mark.parametrize("machine", [CUDA, CPU], ids=["cuda", "cpu"])
def test_nothing_spills_where_the_host_has_room(machine: Machine) -> None:
    machine = replace(machine, ram_bytes=needed_ram(machine))
    plan = chosen(machine)
    assert not plan.spilled_layers
    assert plan.disk.num_state_slots == plan.total_bytes(Tier.NVME) == 0
    without = chosen(replace(machine, spill=None))
    assert without.prediction and plan.prediction
    rates = replace(without.prediction, profile=plan.prediction.profile)  # which have a disk
    assert plan == replace(without, prediction=rates, limits=replace(without.limits, spill_bytes=DISK.limit_bytes))
    assert "on disk" not in describe(plan)


def test_nothing_spills_without_a_folder_for_it() -> None:
    short = replace(CUDA, ram_bytes=needed_ram(CUDA) - 6 * state_bytes(1))
    assert chosen(short).spilled_layers
    with pytest.raises(
        CapacityError, match=r"of host RAM, .* available: .*a folder on NVMe with .* of room as spill\.path"
    ):
        chosen(replace(short, spill=None))


@pytest.mark.parametrize("on_device", [0, 3])
@pytest.mark.parametrize("machine", [CUDA, CPU], ids=["cuda", "cpu"])
def test_as_few_layers_spill_as_host_memory_needs(machine: Machine, on_device: int) -> None:
    layout, counts = shape()[0].layout(), []
    for missing in STEPS[:20]:
        plan = planned(missing, machine, on_device=on_device)
        assert fits(plan)
        spilled = sorted(plan.spilled_layers)
        counts.append(len(spilled))
        for first in range(len(spilled)):
            kept = set(spilled[: first + 1])  # the last that were taken
            layers = [replace(x, state=Tier.HOST) if i in kept else x for i, x in enumerate(plan.layers)]
            fewer = replace(plan, layers=tuple(layers))
            of_host = sum(row.num_bytes for row in host_memory_items(fewer, layout))
            on_cpu = plan.total_bytes(Tier.HBM) if plan.device == "cpu" else 0
            assert of_host + on_cpu > plan.limits.ram_bytes
    assert counts[0] == 0
    assert len(set(counts)) > 4


def test_one_byte_less_is_one_layer_more() -> None:
    missing = 4 * state_bytes(1)
    some = planned(missing)
    exactly = missing + spare_ram(some)
    assert spare_ram(planned(exactly)) == 0
    counts = [len(planned(num_bytes).spilled_layers) for num_bytes in (missing, exactly, exactly + 1)]
    assert counts == [counts[0], counts[0], counts[0] + 1]


def test_the_last_blocks_spill_first_and_the_ends_last() -> None:
    order = [*range(BLOCKS, 1, -1), HEAD]  # embedding and first block are on the device
    seen = {planned(missing, on_device=2).spilled_layers for missing in STEPS}
    assert seen <= {frozenset(order[:count]) for count in range(len(order) + 1)}
    everything = planned(1 << 40, on_device=2)
    assert everything.spilled_layers == frozenset(order)
    assert not fits(everything)
    assert planned(1 << 40).spilled_layers == frozenset(range(BLOCKS + 2))


def test_what_muon_or_nobody_trains_does_not_spill() -> None:
    """Muon trains matrices of all blocks."""
    with_muon = ParameterRules(muon=True)
    assert planned(0, rules=with_muon).num_muon
    assert planned(1 << 40, rules=with_muon).spilled_layers <= {0, HEAD}
    frozen = ParameterRules(freeze=(r"layers\.",))
    assert planned(1 << 40, rules=frozen).spilled_layers <= {0, HEAD}


def test_what_cannot_help_does_not_spill() -> None:
    """Three layers in memory take as much as the state of three: of two ends alone nothing is gained."""
    ends = planned(1 << 40, rules=ParameterRules(freeze=(r"layers\.",)))
    assert not ends.spilled_layers
    assert ends.total_bytes(Tier.NVME) == ends.disk.num_state_slots == 0
    structure, activations = qwen(12, 512, hidden=512, heads=4, kv_heads=2, inner=1024)
    plan = build_plan(structure, activations, replace(CUDA, ram_bytes=0), REQUEST, CANDIDATE)
    assert plan.spilled_layers == frozenset(range(14))


def test_the_folder_of_spill_files_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that makes them works in another one."""
    structure, activations = qwen(12, 512, hidden=512, heads=4, kv_heads=2, inner=1024)
    plan = build_plan(structure, activations, replace(CUDA, ram_bytes=0), REQUEST, CANDIDATE)
    monkeypatch.chdir(tmp_path)
    assert {file.folder for file in spill_files(plan, structure.layout(), "on/disk").values()} == {tmp_path / "on/disk"}


def bytes_of(plan: Plan, structure: ModelStructure) -> tuple[dict[Tier, int], dict[Tier, int]]:
    """Return the bytes of optimizer state and working copies by tier, as counted and as a run takes them.

    On disk, gradients are included.
    """
    names, layout = ("optimizer state", "state slots", "working copy"), structure.layout()
    counted = {tier: sum(x.num_bytes for x in plan.memory_items if x.tier is tier and x.name in names) for tier in Tier}
    counted[Tier.NVME] = plan.total_bytes(Tier.NVME)
    arenas = arena_sizes(plan, layout)
    on_disk = sum(file.nbytes for file in spill_files(plan, layout, "/nowhere").values())
    in_memory = arenas[WORKING] + sum(arenas[state_arena(k)] for k in range(plan.shards.num_shards))
    return counted, {Tier.HOST: in_memory, Tier.NVME: on_disk, Tier.HBM: 0}


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32, Precision.BF16_NARROW])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_run_takes_no_more_than_is_counted(num_shards: int, num_nodes: int, precision: Precision) -> None:
    machine = replace(CUDA, num_nodes=num_nodes)
    for missing in (*STEPS[::6], 1 << 40):
        plan = planned(missing, machine, num_shards=num_shards, precision=precision)
        counted, taken = bytes_of(plan, shape()[0])
        assert all(counted[tier] >= taken[tier] for tier in Tier)
        cut = 3 * plan.disk.num_state_slots * num_shards * plan.shards.cut_elements * plan.precision.element_bytes
        assert counted[Tier.HOST] - taken[Tier.HOST] <= max(cut, 4096 * num_shards)
        filled_up = 3 * len(plan.spilled_layers) * num_shards * 3 * 4096  # at most 3 extents of 3 kinds
        filled_up += 3 * (len(plan.gradients_on_disk) + len(plan.weights_on_disk)) * num_shards * 4096
        assert counted[Tier.NVME] - taken[Tier.NVME] <= filled_up


@pytest.mark.parametrize("num_shards", [1, 4])
def test_checksums_of_many_blocks_are_counted(num_shards: int) -> None:
    """They are more than a page."""
    structure, activations = qwen(40, 512, hidden=2048, heads=16, kv_heads=2, inner=8192)
    request = replace(REQUEST, num_shards=num_shards)
    plan = build_plan(structure, activations, replace(CUDA, ram_bytes=0), request, CANDIDATE)
    assert plan.total_bytes(Tier.NVME) > 20 << 30
    counted, taken = bytes_of(plan, structure)
    assert all(counted[tier] >= taken[tier] for tier in Tier)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_what_packs_blocks_is_counted(num_shards: int) -> None:
    """The memory is counted for every shard; the rest of the plan is as it was."""
    packing = replace(CUDA, spill=replace(DISK, way=DiskWay(DiskIo.KVIKIO, packed=True)))
    plain, packed = (planned(1 << 40, machine, num_shards=num_shards) for machine in (CUDA, packing))
    assert (packed.disk.io, packed.disk.packed) == (DiskIo.KVIKIO, True)
    assert "on disk" in describe(packed) and "by kvikio with zstd" in describe(packed)
    (before,), (now,) = (
        [x.num_bytes for x in plan.memory_items if x.name == "state slots"] for plan in (plain, packed)
    )
    parts = [spill_layout(packed, shard_layout(packed, shape()[0].layout(), k)) for k in range(num_shards)]
    needed = sum(TRANSFERS * Packer.num_bytes(part.block_bytes) for part in parts)
    assert needed <= now - before <= 1.1 * needed
    assert replace(packed, memory_items=(), disk=replace(packed.disk, io=DiskIo.POSIX, packed=False)) == replace(
        plain, memory_items=()
    )


def test_no_more_is_on_disk_than_may_be() -> None:
    short = replace(CUDA, ram_bytes=needed_ram(CUDA) - 6 * state_bytes(1))
    on_disk = chosen(short).total_bytes(Tier.NVME)
    exactly = replace(short, spill=replace(DISK, limit_bytes=on_disk))
    assert chosen(exactly).total_bytes(Tier.NVME) == on_disk
    limit = on_disk - (16 << 20)
    with pytest.raises(CapacityError) as info:
        chosen(replace(short, spill=replace(DISK, limit_bytes=limit)))
    first, _, arithmetic = str(info.value).partition("\n")
    sizes = f"needs {format_bytes(on_disk)} of disk, {format_bytes(limit)} available"
    assert first.startswith(f"{sizes}: raise spill.limit, or name a folder with more room as spill.path")
    assert f"{format_bytes(on_disk)}   of {format_bytes(limit)}" in arithmetic


def test_layers_live_on_the_device_where_the_disk_has_no_room() -> None:
    """Although none would have to for the host's sake."""
    short = replace(CUDA, ram_bytes=needed_ram(CUDA) - 6 * state_bytes(1), hbm_bytes=16 << 30)
    on_disk = chosen(short).total_bytes(Tier.NVME)
    assert on_disk
    little = replace(short, spill=replace(DISK, limit_bytes=on_disk // 2))
    plan = chosen(little, hbm_layers=None)
    assert plan.hbm_layers
    assert plan.total_bytes(Tier.NVME) <= on_disk // 2


def basis_of(bytes_per_s: float) -> CostBasis:
    structure, _ = shape()
    return CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, 0, bytes_per_s)


def predicted(plan: Plan, bytes_per_s: float) -> Prediction:
    return predict(plan, basis_of(bytes_per_s), shape()[1])


RATES = [1e7 * 2**n for n in range(20)]


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 16])
def test_a_step_takes_at_least_what_the_disk_does(num_micro_batches: int, clip: bool, order: LoopOrder) -> None:
    changes = {"clip": clip, "num_micro_batches": num_micro_batches, "order": order}
    plan = planned(6 * state_bytes(1), **changes)
    assert len(plan.spilled_layers) > 4
    spilled = sum(state_bytes(layer) for layer in plan.spilled_layers)
    spilled += sum(gradient_bytes(plan, layer) for layer in plan.gradients_on_disk)
    steps = []
    for rate in RATES:
        prediction, bounds = predicted(plan, rate), Bounds(plan, basis_of(rate), shape()[1])
        assert prediction.busy_s["disk"] == pytest.approx(2 * spilled / rate)
        assert bounds.disk_s == pytest.approx(2 * spilled / rate)
        assert bounds.disk_s <= prediction.step_s * (1 + 1e-9)
        together = sum(prediction.compute_s.values()) + sum(prediction.exposed_s.values())
        assert together == pytest.approx(prediction.step_s)
        assert min(prediction.exposed_s.values(), default=0.0) >= -1e-9
        steps.append(prediction.step_s)
    assert steps == sorted(steps, reverse=True)
    assert predicted(plan, RATES[0]).bottleneck == "disk"
    in_memory = planned(0, **changes)
    assert not in_memory.spilled_layers
    assert predicted(plan, math.inf).step_s == pytest.approx(predicted(in_memory, math.inf).step_s)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("rate", [6e8, 5e9, 1e10, 1e12])
def test_many_micro_batches_beside_a_disk(rate: float, clip: bool) -> None:
    """Few of them would be hidden by it, so they do not tell what many take."""
    outer = LoopOrder.MICRO_BATCHES_OUTER
    plan = planned(6 * state_bytes(1), order=outer, clip=clip, num_micro_batches=24)
    basis = basis_of(rate)
    simulation = Simulation(plan, basis.layout, *basis.schedule(plan), Prices(plan, basis, shape()[1]))
    steps = [simulation.step() for _ in range(4)]
    assert predicted(plan, rate).step_s == pytest.approx(steps[-1].step_s)


def test_no_disk_that_is_slower_makes_a_faster_plan() -> None:
    short = replace(CUDA, ram_bytes=needed_ram(CUDA) - 6 * state_bytes(1), hbm_bytes=16 << 30)
    steps = []
    for rate in RATES[::4]:
        plan = chosen(replace(short, spill=replace(DISK, bytes_per_s=rate)), hbm_layers=None)
        assert plan.prediction
        steps.append(plan.prediction.step_s)
    assert all(slower * (1 + TIE) >= faster for slower, faster in itertools.pairwise(steps))


def test_what_fits_in_device_memory_is_not_on_a_slow_disk() -> None:
    short = replace(CUDA, ram_bytes=needed_ram(CUDA) - 8 * state_bytes(1), spill=replace(DISK, bytes_per_s=5e8))
    counts, steps = [], []
    for hbm in range(2200, 4000, 300):
        plan = chosen(replace(short, hbm_bytes=hbm << 20), hbm_layers=None)
        assert plan.prediction
        counts.append(len(plan.spilled_layers))
        steps.append(plan.prediction.step_s)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0
    assert all(less * (1 + TIE) >= more for less, more in itertools.pairwise(steps))


def test_gradients_take_the_place_of_activations_before_they_are_on_disk() -> None:
    """The device takes as many as it has room for when activations have gone, of layers whose backward comes last."""
    short = replace(CUDA, ram_bytes=needed_ram(CUDA) - 10 * state_bytes(1), hbm_bytes=1700 << 20)
    plan = chosen(short)
    waiting = plan.deferred_offload_layers
    assert waiting == (*range(len(waiting)),)
    assert waiting
    assert plan.gradients_on_disk
    assert plan.total_bytes(Tier.HBM) <= FILLED_SHARE * short.hbm_bytes
    in_hbm = next(row.num_bytes for row in plan.memory_items if row.name == "gradients in HBM")
    assert in_hbm < sum(gradient_bytes(plan, layer) for layer in waiting)
    roomy = chosen(replace(short, ram_bytes=needed_ram(CUDA)))
    assert not roomy.deferred_offload_layers
