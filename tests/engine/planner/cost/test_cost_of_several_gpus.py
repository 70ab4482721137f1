"""Predictions for several GPUs and hosts: what they share, what that costs, and which plans have what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.structure import LayerKind
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.op_costs import HOST_LINK_BYTES_PER_S
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.request import Candidate, Request
from megatrain_ray.engine.planner.search.candidates import candidates
from megatrain_ray.engine.planner.search.make_plan import make_plan
from tests.support.candidate_plans import build_plan
from tests.support.costs import KEEP, LAYERS, MACHINE, OUTER, RECOMPUTE, REQUEST, predicted, shape

SHARED = ("working copy", "optimizer state", "gradients in waiting")  # of a host


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
    three = predicted(replace(REQUEST, num_gpus=3), candidate).compute_s["sum over GPUs"]
    assert three == pytest.approx(2 * 4 / 3 * twice, rel=0.1), "parts are not equal: sums go whole to all"


def with_muon(request: Request) -> tuple[Plan, Prediction]:
    """Return plan and prediction of the same shape, with the matrices of its blocks trained by Muon."""
    structure, activations = shape(request.seq_len)
    layers = tuple(
        replace(layer, parameters=tuple(replace(p, muon=len(p.shape) == 2) for p in layer.parameters))
        if layer.kind is LayerKind.BLOCK
        else layer
        for layer in structure.layers
    )
    structure, activations = replace(structure, layers=layers), activations.times(request.micro_batch_size)
    plan = build_plan(structure, activations, MACHINE, request, Candidate(LAYERS, RECOMPUTE, 3, 2))
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, 0)
    return plan, predict(plan, basis, activations)


@pytest.mark.parametrize("clip", [True, False])
def test_several_gpus_share_what_muon_takes(clip: bool) -> None:
    """Each GPU takes its share, but all get the sum of what Muon trains.

    In a backward, sums keep GPUs together layer by layer. Directions then take as long as on the GPU with the most of
    seven matrices: two of the MLP's three, or one.
    """
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
    matrix, by_adamw_bytes = 4 * 18944 * 3584, 4 * 6 * 2048  # norms and biases: 3 × 3584 + 2 × 512 elements, padded
    block = by_adamw_bytes + 4 * 2 * (3584 + 512) * 3584 + 3 * matrix
    assert plans[1].slots.momentum_bytes == (block,) * 2
    assert plans[4].slots.momentum_bytes == (matrix,) * 2


def test_several_hosts_share_memory_updates_and_what_is_uploaded() -> None:
    candidate = Candidate(LAYERS, RECOMPUTE, 3, 2)
    structure, activations = shape()

    def planned(num_hosts: int) -> Plan:
        request = replace(REQUEST, num_gpus=4, num_hosts=num_hosts)
        return build_plan(structure, activations, MACHINE, request, candidate)

    one, two = planned(1), planned(2)
    rows = {
        name: [row.num_bytes for plan in (one, two) for row in plan.memory_items if row.name == name] for name in SHARED
    }
    assert all(of_two == of_one // 2 for of_one, of_two in rows.values()), rows
    assert two.slots.weights == one.slots.weights, "a layer is whole on the device"
    of_one, of_two = (predicted(replace(REQUEST, num_gpus=4, num_hosts=number), candidate) for number in (1, 2))
    assert of_two.h2d_bytes == of_one.h2d_bytes // 4, "each GPU uploads its part"
    assert of_two.d2h_bytes == of_one.d2h_bytes
    assert of_two.busy_s["optimizer"] == pytest.approx(of_one.busy_s["optimizer"] / 2)
    assert "all-gather" not in of_one.busy_s
    assert of_two.busy_s["all-gather"] == pytest.approx(0.75 * of_one.h2d_bytes / HOST_LINK_BYTES_PER_S)
    assert of_two.compute_s["sum over GPUs"] > 5 * of_one.compute_s["sum over GPUs"], "the slowest link counts"


def waiting_for_uploads(**changes: Any) -> Any:
    """Return the plan of four GPUs with few tokens each, and no layer on them."""
    structure, activations = shape()
    machine = replace(MACHINE, hbm_bytes=40 << 30, profile=replace(TYPICAL_GPU, **changes))
    request = replace(REQUEST, num_gpus=4, hbm_layers=0, num_micro_batches=1, micro_batch_size=1)
    return make_plan(structure, activations, machine, request)


def test_gpus_upload_parts_where_a_step_waits_for_uploads_and_their_link_is_faster() -> None:
    """That of PCIe, 55 GB/s here, is none of their own; nor is one that nobody has measured."""
    plans = {rate: waiting_for_uploads(gpu_link_bytes_per_s=rate) for rate in (300e9, 100e9, 10e9, None)}
    assert [plan.slots.gathered for plan in plans.values()] == [True, False, False, False]
    assert plans[10e9].prediction.exposed_s["h2d"] > 0
    assert plans[300e9].prediction.h2d_bytes < plans[10e9].prediction.h2d_bytes / 3
    assert plans[300e9].prediction.step_s < plans[10e9].prediction.step_s
    asked = replace(REQUEST, num_gpus=4, hbm_layers=0, num_micro_batches=1, micro_batch_size=1, gathers_slots=True)
    structure, activations = shape()
    assert make_plan(structure, activations, MACHINE, asked).slots.gathered, "by hand, over any link"
    of_many_tokens = replace(REQUEST, num_gpus=4, num_micro_batches=64)
    linked = replace(MACHINE, profile=replace(TYPICAL_GPU, gpu_link_bytes_per_s=300e9))
    assert not make_plan(structure, activations, linked, of_many_tokens).slots.gathered, "it waits for nothing"


def test_one_micro_batch_on_each_of_several_gpus_is_summed_in_fp32() -> None:
    structure, activations = shape()
    request = replace(REQUEST, num_micro_batches=1, micro_batch_size=1)
    plans = (
        build_plan(structure, activations, MACHINE, replace(request, num_gpus=number), Candidate(OUTER, KEEP, 3, 2))
        for number in (1, 2)
    )
    assert [(plan.gradients.accumulate_dtype, plan.gradients.offload_dtype) for plan in plans] == [
        (torch.bfloat16,) * 2,
        (torch.float32,) * 2,
    ]


def test_no_plan_of_several_gpus_has_sums_that_wait_on_the_host() -> None:
    """The slab has room for one sum of a layer."""
    structure, _ = shape()
    of = {number: list(candidates(structure, replace(REQUEST, num_gpus=number))) for number in (1, 2)}
    assert {candidate.sums for candidate in of[1]} == {Tier.HBM, Tier.HOST}
    assert {candidate.sums for candidate in of[2]} == {Tier.HBM}
