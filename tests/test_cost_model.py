"""Predictions: near what was measured on one H200, and in the proportions that can be said without measuring."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.candidates import candidates
from megatrain_ray.engine.cost_basis import CostBasis
from megatrain_ray.engine.cost_model import predict
from megatrain_ray.engine.hardware_profile import TYPICAL_GPU, HardwareProfile, RatePoint, interpolate
from megatrain_ray.engine.layer_work import work_of
from megatrain_ray.engine.model import LayerKind
from megatrain_ray.engine.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan_request import Candidate, Machine, Request
from megatrain_ray.engine.plan_search import make_plan
from megatrain_ray.engine.planner import build_plan, residency_of
from megatrain_ray.engine.precision import Precision
from megatrain_ray.engine.prediction import Prediction
from megatrain_ray.engine.prices import HOST_LINK_BYTES_PER_S, Prices
from megatrain_ray.engine.simulation import Simulation
from megatrain_ray.engine.tier import Tier
from megatrain_ray.engine.visits import LoopOrder, visits
from megatrain_ray.trace import Op, Stage
from tests.shapes import qwen

MACHINE = Machine(device="cuda", num_cpus=16, num_nodes=1, ram_bytes=1 << 41, hbm_bytes=None, profile=TYPICAL_GPU)
REQUEST = Request(Precision.BF16, False, True, 16, 4, 1024)
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
OUTER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
COMPILED_BYTES = 159_000  # that a compiled layer of 7B keeps of a token; 225_000 where it is not
SHARED = ("working copy", "optimizer state", "gradients in waiting")  # of a host


@cache
def shape(seq_len: int = 1024) -> tuple[Any, ActivationBytes]:
    """Qwen2.5-7B's."""
    return qwen(28, seq_len, hidden=3584, heads=28, kv_heads=4, inner=18944)  # type: ignore[no-any-return]


def predicted(
    request: Request,
    candidate: Candidate,
    profile: HardwareProfile = TYPICAL_GPU,
    changes: dict[str, Any] | None = None,
    kept_bytes: int | None = None,
) -> Prediction:
    """`changes`: of all layers of the plan."""
    structure, activations = shape(request.seq_len)
    activations = activations.times(request.micro_batch_size)
    if kept_bytes:
        tokens = request.micro_batch_size * request.seq_len
        activations = replace(activations, kept=(0, *(kept_bytes * tokens,) * 28, activations.kept[-1]))
    plan = build_plan(structure, activations, MACHINE, request, candidate)
    plan = replace(plan, layers=tuple(replace(layer, **changes or {}) for layer in plan.layers))
    return predict(
        plan, CostBasis(structure, structure.layout(), work_of(structure), profile, True, False), activations
    )


@pytest.mark.parametrize(
    ("sequences", "seq_len", "policy", "updates", "measured_s", "within"),
    [
        (64, 1024, RECOMPUTE, True, 6.06, 0.1),
        (64, 1024, RECOMPUTE, False, 5.95, 0.1),
        (16, 1024, KEEP, False, 1.16, 0.1),
        (24, 1024, KEEP, False, 1.74, 0.1),
        (16, 1024, KEEP, True, 2.22, 0.1),
        # Predicted too slow. Of these two the updates under the backward decide, whose rate was between 3.7 and 4.4
        # Gparam/s, and the one predicted for all 7.6B parameters is 4.2.
        (24, 1024, KEEP, True, 2.24, 0.2),
        (6, 4096, KEEP, True, 2.21, 0.2),
        # Where it waits for loads it may have had the embedding on the device.
        (8, 1024, KEEP, False, 0.65, 0.15),
    ],
)
def test_near_the_feasibility_probe(
    sequences: int, seq_len: int, policy: ActivationPolicy, updates: bool, measured_s: float, within: float
) -> None:
    """One process on one H200: 7.6B parameters, compiled layers, three slots, AdamW as gradients land or not at all."""
    profile = TYPICAL_GPU if updates else replace(TYPICAL_GPU, adamw_busy_per_s=1e15)
    request = replace(REQUEST, clip=False, micro_batch_size=sequences, num_micro_batches=1, seq_len=seq_len)
    prediction = predicted(request, Candidate(OUTER, policy, 3, 2), profile, kept_bytes=COMPILED_BYTES)
    assert prediction.step_s == pytest.approx(measured_s, rel=within)
    together = sum(prediction.compute_s.values()) + sum(prediction.exposed_s.values())
    assert prediction.step_s == pytest.approx(together)
    assert prediction.bottleneck == ("optimizer" if updates and sequences < 64 else "compute")


def test_an_update_takes_the_time_of_its_bytes() -> None:
    """26 of a parameter by which the rate was measured: state read and written, and a gradient of 2; 18 with moments in
    bf16, by shards and by the device."""
    structure, activations = shape()
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, False)
    request = replace(REQUEST, num_micro_batches=1)

    def update_s(precision: Precision, name: str) -> float:
        candidate = Candidate(OUTER, KEEP, 3, 2)
        plan = build_plan(structure, activations, MACHINE, replace(request, precision=precision), candidate)
        return Prices(plan, basis, activations).of_layer(name, 1)

    for name in ("shards", "update"):
        ratio = update_s(Precision.BF16_NARROW, name) / update_s(Precision.BF16, name)
        assert ratio == pytest.approx(18 / 26)


def test_near_a_run_of_the_engine() -> None:
    """benchmarks/results/2026-11-21_h200_7b_train.json: 16 × 1024 tokens, kept, clipping, one micro-batch."""
    prediction = predicted(replace(REQUEST, num_micro_batches=1), Candidate(OUTER, KEEP, 3, 2))
    assert prediction.step_s == pytest.approx(2.278, rel=0.05)
    assert prediction.model_tflops == pytest.approx(309.5, rel=0.05)
    assert prediction.bottleneck == "optimizer"


def test_one_eager_layer() -> None:
    """595 model TFLOPS at 16 × 1024 tokens, forward and backward."""
    structure, activations = shape()
    request = replace(REQUEST, num_micro_batches=1)
    plan = build_plan(structure, activations.times(16), MACHINE, request, Candidate(OUTER, KEEP, 3, 2))
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, False)
    prices = Prices(plan, basis, activations.times(16))
    seconds = sum(prices(Stage.COMPUTE, Op(name, 1)) for name in ("forward", "backward"))
    assert basis.work[1].flops(16 * 1024, 16 * 1024 * 1024) / seconds / 1e12 == pytest.approx(595, rel=0.05)


def test_layers_outermost_hides_updates_that_clipping_puts_off() -> None:
    layers, outer = (predicted(REQUEST, Candidate(order, RECOMPUTE, 3, 2)) for order in (LAYERS, OUTER))
    assert outer.exposed_s["optimizer"] > 3 * layers.exposed_s["optimizer"]
    assert layers.step_s < outer.step_s
    assert layers.h2d_bytes < outer.h2d_bytes / 3
    # Of the FP32 sums of its blocks, which are read and written for every second of four micro-batches.
    blocks = sum(layer.trained.size for layer in shape()[0].layout().layers[1:-1])
    less_s = 4 / 2 * 8 * blocks / TYPICAL_GPU.device_bytes_per_s
    assert layers.compute_s == pytest.approx(outer.compute_s | {"backward": outer.compute_s["backward"] - less_s})


def test_layers_on_the_device_move_nothing_and_update_themselves() -> None:
    """26 bytes a parameter through device memory; the same compute, nothing on PCIe or on the host."""
    on_device = {"weights": Tier.HBM, "state": Tier.HBM, "gradients": Tier.HBM, "updated_by": "gpu"}
    candidate = Candidate(LAYERS, KEEP, 3, 2)
    prediction, streamed = predicted(REQUEST, candidate, changes=on_device), predicted(REQUEST, candidate)
    assert (prediction.h2d_bytes, prediction.d2h_bytes) == (0, 0)
    assert prediction.busy_s.get("optimizer", 0) == 0
    num_parameters = sum(math.prod(p.shape) for layer in shape()[0].layers for p in layer.parameters)
    update_s = prediction.compute_s["update"]
    assert update_s == pytest.approx(28 * num_parameters / TYPICAL_GPU.device_bytes_per_s)  # gradients are FP32 sums
    assert prediction.step_s == pytest.approx(sum(streamed.compute_s.values()) + update_s)


@pytest.mark.parametrize("sums", [Tier.HBM, Tier.HOST])
def test_many_micro_batches_are_told_from_three(sums: Tier) -> None:
    structure, activations = shape()
    request = replace(REQUEST, micro_batch_size=2, num_micro_batches=9)
    candidate = Candidate(OUTER, KEEP, 3, 2, sums)
    plan = build_plan(structure, activations.times(2), MACHINE, request, candidate)
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, False)
    prediction = predict(plan, basis, activations.times(2))
    order = visits(len(plan.layers), 9, OUTER)
    residency = residency_of(order, structure, basis.layout, plan)
    prices = Prices(plan, basis, activations.times(2))
    simulation = Simulation(plan, basis.layout, order, residency, prices)
    simulation.step()
    whole = simulation.step()
    assert prediction.step_s == pytest.approx(whole.step_s, rel=1e-3)
    assert prediction.h2d_bytes == whole.num_bytes[Stage.H2D]


def chosen(hbm_gb: float, profile: HardwareProfile = TYPICAL_GPU, **changes: Any) -> Plan:
    structure, activations = shape()
    request = replace(REQUEST, **changes)
    machine = replace(MACHINE, hbm_bytes=int(hbm_gb * 1e9), profile=profile)
    return make_plan(structure, activations.times(request.micro_batch_size), machine, request)


def test_the_fastest_that_fits_is_chosen() -> None:
    """More device memory never makes a plan slower, and the split is a choice like any other."""
    free = {"micro_batch_size": 1, "num_micro_batches": 64, "free_split": True}
    plans = [chosen(gb, **free) for gb in (24, 80, 141)]
    step_s = [plan.prediction.step_s for plan in plans if plan.prediction]
    assert sorted(step_s, reverse=True) == step_s
    assert step_s[-1] < 0.9 * step_s[0]
    assert all(plan.micro_batch_size * plan.num_micro_batches == 64 for plan in plans)
    fixed = [chosen(141, micro_batch_size=b, num_micro_batches=64 // b).prediction for b in (1, 4, 16, 64)]
    assert step_s[-1] <= 1.02 * min(prediction.step_s for prediction in fixed if prediction)


def test_the_choice_follows_the_machine() -> None:
    """Where copies are slow sums do not travel, and weights travel once a step."""
    free = {"micro_batch_size": 4, "num_micro_batches": 16}
    slow = replace(TYPICAL_GPU, both_bytes_per_s=5e9)
    assert chosen(60, slow, **free).order is LAYERS
    assert chosen(60, slow, **free) == chosen(60, slow, **free)


def test_boundaries_wait_on_the_host_where_the_device_is_small() -> None:
    """64 × 1024 tokens in 16 GiB: those of 28 layers are 12 GiB, and take 4 % of a step's time on PCIe."""
    plan = chosen(16, micro_batch_size=4, num_micro_batches=16)
    assert (plan.order, plan.sums) == (LAYERS, Tier.HBM)
    assert plan.boundary_bytes == 28 * 64 * 1024 * 3584 * 2
    assert plan.prediction is not None
    assert sum(plan.prediction.exposed_s.values()) < 0.1 * plan.prediction.step_s
    assert not chosen(120, micro_batch_size=4, num_micro_batches=16).boundary_bytes


def test_a_deep_model_is_planned_in_a_moment() -> None:
    structure, activations = qwen(180, 1024, hidden=2048, heads=16, kv_heads=2, inner=8192)
    request = replace(REQUEST, micro_batch_size=1, num_micro_batches=64, free_split=True)
    start_s = time.process_time()
    plan = make_plan(structure, activations, replace(MACHINE, hbm_bytes=80 << 30), request)
    assert time.process_time() - start_s < 5.0  # 0.2 s where nothing else runs
    assert plan.prediction is not None


def test_rates_between_the_measured_sizes() -> None:
    curve = (RatePoint(100.0, 10.0), RatePoint(10000.0, 1000.0))
    assert interpolate(curve, 1000.0) == pytest.approx(100.0)
    assert interpolate(curve, 1e9) == 1000.0
    assert 50.0 / interpolate(curve, 50.0) == 100.0 / interpolate(curve, 100.0), "a launch, however small"


def test_a_profile_survives_json() -> None:
    assert HardwareProfile.from_json(TYPICAL_GPU.to_json()) == TYPICAL_GPU


def test_several_gpus_share_what_leaves_and_updates_and_compute_more_at_a_time() -> None:
    candidate = Candidate(LAYERS, RECOMPUTE, 3, 2)
    one, four = (predicted(replace(REQUEST, num_gpus=number), candidate) for number in (1, 4))
    assert four.d2h_bytes == one.d2h_bytes // 4
    assert four.h2d_bytes == one.h2d_bytes, "each uploads whole layers"
    assert four.busy_s["optimizer"] == one.busy_s["optimizer"]
    sums_s = four.compute_s["sum over GPUs"]
    assert 0 < sums_s < 0.05 * four.step_s
    assert sum(four.compute_s.values()) == pytest.approx(sum(one.compute_s.values()) + sums_s)
    assert four.model_tflops == pytest.approx(4 * one.model_tflops, rel=0.05), "of all of them"
    twice = predicted(replace(REQUEST, num_gpus=2), candidate).compute_s["sum over GPUs"]
    assert sums_s == pytest.approx(1.5 * twice), "each sends what it has of the others' parts: three quarters, a half"


def with_muon(request: Request) -> tuple[Plan, Prediction]:
    """Of the same shape, the matrices of its blocks trained by Muon."""
    structure, activations = shape(request.seq_len)
    layers = tuple(
        replace(layer, parameters=tuple(replace(p, muon=len(p.shape) == 2) for p in layer.parameters))
        if layer.kind is LayerKind.BLOCK
        else layer
        for layer in structure.layers
    )
    structure, activations = replace(structure, layers=layers), activations.times(request.micro_batch_size)
    plan = build_plan(structure, activations, MACHINE, request, Candidate(LAYERS, RECOMPUTE, 3, 2))
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, False)
    return plan, predict(plan, basis, activations)


@pytest.mark.parametrize("clip", [True, False])
def test_several_gpus_share_what_muon_takes(clip: bool) -> None:
    """But all get the sum of what it trains. In a backward, where sums keep GPUs together layer by layer, directions
    take as long as of the GPU with the most of seven matrices: two of the MLP's three, or one."""
    request = replace(REQUEST, clip=clip)
    found = {number: with_muon(replace(request, num_gpus=number)) for number in (1, 2, 4)}
    plans, predictions = ({number: pair[k] for number, pair in found.items()} for k in (0, 1))
    by_adamw = {n: predicted(replace(request, num_gpus=n), Candidate(LAYERS, RECOMPUTE, 3, 2)) for n in (1, 4)}
    assert predictions[4].d2h_bytes == pytest.approx(predictions[1].d2h_bytes / 4, rel=1e-6)
    to_device = [predictions[number].h2d_bytes - by_adamw[number].h2d_bytes for number in (1, 4)]
    assert to_device[1] == pytest.approx(to_device[0] / 4, rel=1e-6)
    directed_s = {number: prediction.compute_s["orthogonalize"] for number, prediction in predictions.items()}
    for number, in_backward in ((2, 0.567), (4, 0.284)):
        share = 1 / number if clip else in_backward
        assert directed_s[number] == pytest.approx(share * directed_s[1], rel=0.01)
    summed_s = [of[4].compute_s["sum over GPUs"] for of in (predictions, by_adamw)]
    sizes = shape()[0].layout().trained_sizes
    assert summed_s[0] == pytest.approx((1 + sum(sizes[1:-1]) / sum(sizes)) * summed_s[1])
    matrix = 4 * 18944 * 3584
    assert plans[1].momentum_slot_bytes[0] > 3.4 * matrix
    assert plans[4].momentum_slot_bytes == (matrix,) * 2


def test_several_hosts_share_memory_updates_and_what_is_uploaded() -> None:
    candidate = Candidate(LAYERS, RECOMPUTE, 3, 2)
    structure, activations = shape()

    def planned(num_hosts: int) -> Plan:
        request = replace(REQUEST, num_gpus=4, num_hosts=num_hosts)
        return build_plan(structure, activations, MACHINE, request, candidate)

    one, two = planned(1), planned(2)
    rows = {name: [row.num_bytes for plan in (one, two) for row in plan.rows if row.name == name] for name in SHARED}
    assert all(of_two == of_one // 2 for of_one, of_two in rows.values()), rows
    assert two.slots == one.slots, "a layer is whole on the device"
    of_one, of_two = (predicted(replace(REQUEST, num_gpus=4, num_hosts=number), candidate) for number in (1, 2))
    assert of_two.h2d_bytes == of_one.h2d_bytes // 4, "each GPU uploads its part"
    assert of_two.d2h_bytes == of_one.d2h_bytes
    assert of_two.busy_s["optimizer"] == pytest.approx(of_one.busy_s["optimizer"] / 2)
    assert "all-gather" not in of_one.busy_s
    assert of_two.busy_s["all-gather"] == pytest.approx(0.75 * of_one.h2d_bytes / HOST_LINK_BYTES_PER_S)
    assert of_two.compute_s["sum over GPUs"] > 5 * of_one.compute_s["sum over GPUs"], "the slowest link counts"


def waiting_for_uploads(**changes: Any) -> Plan:
    """Of four GPUs with few tokens each, and no layer on them."""
    structure, activations = shape()
    machine = replace(MACHINE, hbm_bytes=40 << 30, profile=replace(TYPICAL_GPU, **changes))
    request = replace(REQUEST, num_gpus=4, hbm_layers=0, num_micro_batches=1, micro_batch_size=1)
    return make_plan(structure, activations, machine, request)


def test_gpus_upload_parts_where_a_step_waits_for_uploads_and_their_link_is_faster() -> None:
    plans = {rate: waiting_for_uploads(gpu_link_bytes_per_s=rate) for rate in (300e9, 10e9)}
    assert {rate: plan.gathers_slots for rate, plan in plans.items()} == {300e9: True, 10e9: False}
    predictions = {rate: plan.prediction for rate, plan in plans.items()}
    assert predictions[10e9].exposed_s["h2d"] > 0
    assert predictions[300e9].h2d_bytes < predictions[10e9].h2d_bytes / 3
    assert predictions[300e9].step_s < predictions[10e9].step_s
    of_many_tokens = replace(REQUEST, num_gpus=4, num_micro_batches=64)
    structure, activations = shape()
    assert not make_plan(structure, activations, MACHINE, of_many_tokens).gathers_slots, "it waits for nothing"


def test_one_micro_batch_on_each_of_several_gpus_is_summed_in_fp32() -> None:
    structure, activations = shape()
    request = replace(REQUEST, num_micro_batches=1, micro_batch_size=1)
    plans = (
        build_plan(structure, activations, MACHINE, replace(request, num_gpus=number), Candidate(OUTER, KEEP, 3, 2))
        for number in (1, 2)
    )
    assert [(plan.sum_dtype, plan.gradient_dtype) for plan in plans] == [("bfloat16",) * 2, ("float32",) * 2]


def test_no_plan_of_several_gpus_has_sums_that_wait_on_the_host() -> None:
    """The slab has room for one sum of a layer."""
    structure, _ = shape()
    of = {number: list(candidates(structure, replace(REQUEST, num_gpus=number))) for number in (1, 2)}
    assert {candidate.sums for candidate in of[1]} == {Tier.HBM, Tier.HOST}
    assert {candidate.sums for candidate in of[2]} == {Tier.HBM}
