"""make_plan: byte arithmetic checked by hand, limits obeyed, refusals with the arithmetic."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.precision import NARROW_MOMENTS, Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.parameter_rules import ALL_ALIKE, ParameterRules
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost import layer_costs
from megatrain_ray.engine.planner.limits import spare_ram
from megatrain_ray.engine.planner.memory.host_bytes import BESIDE_GPU_BYTES, PROCESS_BYTES
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.engine.planner.search.candidates import candidates
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.units import format_bytes
from tests.support import planned_steps
from tests.support.candidate_plans import build_plan
from tests.support.planned_steps import PROFILE, planned
from tests.support.shapes import qwen

KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
HIDDEN, INNER, LAYERS, VOCAB, BATCH, SEQ = 128, 256, 4, 512, 2, 64
BLOCK = HIDDEN * HIDDEN * 2 + 2 * HIDDEN * 64 + 3 * HIDDEN * INNER + 2 * HIDDEN  # q, o, k and v of 64, MLP, norms
MACHINE = Machine(device="cuda", num_cpus=16, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
REQUEST = Request(Precision.BF16, False, True, BATCH, 1, SEQ, hbm_layers=0)


@cache
def model(*, tied: bool = False, rules: ParameterRules = ALL_ALIKE) -> tuple[ModelStructure, ActivationBytes]:
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=VOCAB, tie_word_embeddings=tied,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return discover(factory, torch.bfloat16, BATCH, SEQ, rules)


def rows(plan: Plan, tier: Tier) -> dict[str, int]:
    return {row.name: row.num_bytes for row in plan.memory_items if row.tier is tier}


def test_twelve_bytes_a_parameter() -> None:
    """2 for the working copy and 10 of state; 2 more for a clipped gradient that waits on the host."""
    structure, activations = model()
    plan = make_plan(structure, activations, MACHINE, REQUEST)
    padded = structure.layout().size
    parameters = LAYERS * BLOCK + 2 * VOCAB * HIDDEN + HIDDEN
    assert sum(layer.num_parameters for layer in plan.layers) == parameters
    host = rows(plan, Tier.HOST)
    assert host == {
        "working copy": 2 * padded,
        "optimizer state": 10 * padded,
        "gradients in waiting": 2 * padded,
        # A block of 262144 elements a thread; 8 bytes for each 1024 of the largest layer, and for a part of them.
        "journals": 16 * 12 * (1 << 18) + 8 * (max(layer.size for layer in structure.layout().layers) // 1024 + 1),
        "processes": 5 * PROCESS_BYTES + BESIDE_GPU_BYTES,
        "copies for saves": 12 * parameters,
    }
    assert host["copies for saves"] == plan.saves.copy_bytes
    without = make_plan(structure, activations, MACHINE, replace(REQUEST, saves=False))
    assert "copies for saves" not in rows(without, Tier.HOST)
    assert without.saves.copy_bytes == 0
    assert padded - parameters < (LAYERS + 2) * 2048


@pytest.mark.parametrize("precision", [Precision.BF16_NARROW, Precision.FP32_NARROW])
def test_eight_bytes_a_parameter_with_moments_in_bf16(precision: Precision) -> None:
    """State, journals, saves and layers on the device."""
    (structure, activations), request = model(), replace(REQUEST, precision=precision)
    plan = make_plan(structure, activations, MACHINE, request)
    padded = structure.layout().size
    host = rows(plan, Tier.HOST)
    assert host["working copy"] + host["optimizer state"] == 8 * padded
    assert host["journals"] == rows(make_plan(*model(), MACHINE, REQUEST), Tier.HOST)["journals"] - 16 * 4 * (1 << 18)
    assert plan.save_bytes == plan.updated_bytes == 8 * plan.num_parameters
    on_device = make_plan(structure, activations, MACHINE, replace(request, hbm_layers=1))
    assert rows(on_device, Tier.HBM)["layers in HBM"] == 8 * structure.layout().layers[0].size
    assert f"moments   {NARROW_MOMENTS}" in describe(plan)
    assert plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("clip", [True, False])
def test_eight_bytes_a_parameter_that_muon_trains(clip: bool) -> None:
    """What Muon trains has no second moment; directions (bf16) of four layers wait on the host.

    Two momenta, two directions and the work on one matrix of the MLP are on the device.
    """
    structure, activations = model(rules=ParameterRules(muon=True))
    adamw = make_plan(*model(), MACHINE, replace(REQUEST, clip=clip))
    plan = make_plan(structure, activations, MACHINE, replace(REQUEST, clip=clip))
    matrices, block = BLOCK - 2 * HIDDEN, structure.layout().layers[1].trained.size
    assert [layer.num_muon for layer in plan.layers] == [0, *[matrices] * LAYERS, 0]
    assert block - BLOCK < 2 * 2048
    host, hbm = rows(plan, Tier.HOST), rows(plan, Tier.HBM)
    padded, of_adamw = structure.layout().size, sum(x.adamw.size for x in structure.layout().layers)
    assert padded - of_adamw == LAYERS * (block - 2048)
    assert host["optimizer state"] == 6 * padded + 4 * of_adamw
    assert host["directions in waiting"] == plan.gradients.direction_slab_bytes == 4 * 2 * block
    work = 8 * HIDDEN * INNER + 4 * HIDDEN**2
    assert hbm["muon"] == 2 * 4 * block + 2 * 2 * block + work
    assert plan.slots.momentum_bytes == (4 * block,) * 2
    assert plan.save_bytes == adamw.save_bytes - 4 * LAYERS * matrices
    assert rows(adamw, Tier.HBM).keys() == hbm.keys() - {"muon"}
    up = LAYERS * matrices * (4 + 2 * clip)
    assert f"{format_bytes(up)} a step; directions to the host, {format_bytes(2 * LAYERS * matrices)}" in describe(plan)


def test_two_bytes_a_frozen_parameter() -> None:
    """The lower half of the blocks and the embedding are frozen.

    They have no state, no gradient, no activation that waits, and no upload in the backward.
    """
    rules = ParameterRules(freeze=("embed", rf"layers\.[0-{LAYERS // 2 - 1}]\."))
    everything, structure = model(), model(rules=rules)[0]
    activations = model(rules=rules)[1]
    plan = make_plan(structure, activations, MACHINE, REQUEST)
    padded, whole = structure.layout().size, make_plan(*everything, MACHINE, REQUEST)
    assert padded == everything[0].layout().size
    trained = LAYERS // 2 * BLOCK + VOCAB * HIDDEN + HIDDEN
    assert (plan.num_trained, plan.num_parameters) == (trained, whole.num_parameters)
    assert plan.save_bytes == 12 * trained + 2 * (plan.num_parameters - trained)
    host = rows(plan, Tier.HOST)
    trained_size = sum(layer.trained.size for layer in structure.layout().layers)
    assert 0 <= trained_size - trained < (LAYERS // 2 + 1) * 2048
    assert host["working copy"] == 2 * padded
    assert host["optimizer state"] == 10 * trained_size
    assert host["gradients in waiting"] == plan.gradients.slab_bytes == 2 * trained_size
    assert host["copies for saves"] == 12 * trained
    assert plan.layer_order == (3, 4, 5)
    hbm = rows(plan, Tier.HBM)
    assert hbm["boundary activations"] == (LAYERS // 2 + 1) * BATCH * SEQ * HIDDEN * 2
    assert activations.kept[:3] == (0, 0, 0)
    assert activations.kept[3] < everything[1].kept[3], "its first norm hands nothing on"
    assert activations.kept[4:] == everything[1].kept[4:]
    assert plan.slots.num_uploads == LAYERS + 2
    assert whole.slots.num_uploads > LAYERS + 2


def test_frozen_matrices_keep_fewer_activations() -> None:
    """Products with a frozen matrix need no inputs in backward."""
    all_of_it, norms_alone = model()[1], model(rules=ParameterRules(trainable=("norm",)))[1]
    assert norms_alone.kept[1] < 0.8 * all_of_it.kept[1]


def test_device_bytes_by_hand() -> None:
    structure, activations = model()
    plan = make_plan(structure, activations, MACHINE, REQUEST)
    hbm = rows(plan, Tier.HBM)
    block, edge = structure.layout().layers[1].size, VOCAB * HIDDEN
    head = structure.layout().layers[-1].size
    assert hbm["slots"] == 3 * 2 * block + 2 * edge + 2 * head
    assert hbm["gradient slots"] == 2 * 2 * max(block, head)
    assert hbm["boundary activations"] == (LAYERS + 1) * BATCH * SEQ * HIDDEN * 2
    assert hbm["kept activations"] == sum(activations.kept[: LAYERS + 1])
    # All logits at once and what is between them in FP32; what enters the head, its gradient, and what its norm keeps.
    loss = BATCH * SEQ * (VOCAB * (2 * 2 + 8) + 2 * HIDDEN * 2) + activations.kept[-1]
    backward = 2 * activations.kept[1] + 2 * BATCH * SEQ * HIDDEN * 2 + 2 * block
    assert hbm["work"] == max(loss, backward) == backward


def test_the_measured_activations_of_a_llama_layer() -> None:
    """What autograd saves of one layer, counted by hand, is what the trial forward finds: bytes a token."""
    _, activations = model()
    tokens, heads = BATCH * SEQ, 4
    # FP32 input and its inverse root mean square; the BF16 normalised input, for the weight's gradient; the output.
    norm = HIDDEN * 4 + 4 + HIDDEN * 2 + HIDDEN * 2
    # q, k, v (of half as many heads) and the output; FP32 log-sum-exp of each head. No mask: SDPA knows causality.
    attention = 3 * HIDDEN * 2 + heads * 4
    # Gate, its SiLU, up, and their product.
    mlp = 4 * INNER * 2
    assert activations.boundary == (0, *(tokens * HIDDEN * 2,) * (LAYERS + 1))
    assert activations.kept[1 : LAYERS + 1] == (tokens * (2 * norm + attention + mlp),) * LAYERS
    assert activations.kept[0] == 0, "an embedding keeps its ids alone, which enter it"


def test_the_fastest_plan_that_fits_is_chosen() -> None:
    structure, activations = model()
    request = replace(REQUEST, num_micro_batches=4)

    def chosen(hbm: int | None) -> tuple[LoopOrder, ActivationPolicy, int]:
        plan = make_plan(structure, activations, replace(MACHINE, hbm_bytes=hbm), request)
        assert hbm is None or plan.total_bytes(Tier.HBM) <= hbm
        return plan.step.order, plan.layers[1].activations, len(plan.slots.weights)

    everything = chosen(None)
    assert everything == (LoopOrder.LAYERS_OUTER, ActivationPolicy.KEEP, 5)
    total = make_plan(structure, activations, MACHINE, request).total_bytes(Tier.HBM)
    seen = [everything]
    for hbm in range(total, 0, -(total - (1 << 30)) // 50 or -1):
        try:
            choice = chosen(hbm)
        except CapacityError:
            break
        if choice != seen[-1]:
            seen.append(choice)
    assert len(seen) >= 3
    assert any(policy is ActivationPolicy.RECOMPUTE for _, policy, _ in seen)


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    structure, activations = model()
    with pytest.raises(CapacityError, match=r"of device memory, 1\.00 MiB available: raise hardware") as info:
        make_plan(structure, activations, replace(MACHINE, hbm_bytes=1 << 20), REQUEST)
    assert info.value.exit_code == 3
    assert "boundary activations" in str(info.value)
    with pytest.raises(CapacityError, match=r"of host RAM, 1\.00 GiB available"):
        make_plan(structure, activations, replace(MACHINE, ram_bytes=1 << 30), REQUEST)


def test_sums_go_to_the_host_when_nothing_else_fits() -> None:
    """Many micro-batches: layers outermost would hold all their boundary activations."""
    structure, activations = model()
    request = replace(REQUEST, num_micro_batches=32)
    plans = [build_plan(structure, activations, MACHINE, request, c) for c in candidates(structure, request)]
    smallest = min(plan.total_bytes(Tier.HBM) for plan in plans if plan.gradients.sums is Tier.HBM)
    assert make_plan(structure, activations, MACHINE, request).gradients.sums is Tier.HBM
    plan = make_plan(structure, activations, replace(MACHINE, hbm_bytes=smallest - 1), request)
    assert (plan.gradients.sums, plan.step.order) == (Tier.HOST, LoopOrder.MICRO_BATCHES_OUTER)
    assert plan.total_bytes(Tier.HBM) < smallest
    assert rows(plan, Tier.HOST)["gradients in waiting"] == 4 * structure.layout().size


def test_boundaries_go_to_the_host_where_they_fill_the_device() -> None:
    """Of all micro-batches, the device has those of one layer or their gradients, and two more."""
    structure, activations = model()
    request = replace(REQUEST, num_micro_batches=16)
    kept, away = (
        build_plan(
            structure, activations, MACHINE, request,
            Candidate(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, 2, 1, boundaries=tier),
        )
        for tier in (Tier.HBM, Tier.HOST)
    )  # fmt: skip
    one = BATCH * SEQ * HIDDEN * 2
    assert [layer.boundary for layer in away.layers] == [Tier.HBM, *[Tier.HOST] * LAYERS, Tier.HBM]
    assert rows(kept, Tier.HBM)["boundary activations"] == 16 * (LAYERS + 1) * one
    assert rows(away, Tier.HBM)["boundary activations"] == (16 + 2) * one
    assert rows(away, Tier.HOST)["boundary activations"] == away.host_boundary_bytes == 16 * LAYERS * one
    assert "boundary activations" not in rows(kept, Tier.HOST)
    assert f"boundary  activations of {LAYERS} layers wait on the host" in describe(away)


@pytest.mark.parametrize("segment", [1, 2, 3, 8])
def test_of_a_segment_one_boundary_waits_and_the_others_are_there_together(segment: int) -> None:
    """There is one more, which a replay copies there."""
    structure, activations = model()
    request = replace(REQUEST, num_micro_batches=4)
    candidate = Candidate(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, 2, 1, segment=segment)
    plan = build_plan(structure, activations, MACHINE, request, candidate)
    blocks = plan.layers[1:-1]
    assert [layer.boundary for layer in blocks] == [None if i % segment else Tier.HBM for i in range(LAYERS)]
    assert plan.replayed_layers == {i for i in range(1, LAYERS) if i % segment}
    waiting = -(-LAYERS // segment) + 1  # the head's
    inside = 4 * (min(segment, LAYERS) - 1) + 1 if segment > 1 else 0
    one = BATCH * SEQ * HIDDEN * 2
    assert rows(plan, Tier.HBM)["boundary activations"] == (4 * waiting + inside) * one
    line = f"boundary  activations of {len(plan.replayed_layers)} layers are computed again for their backward"
    assert (line in describe(plan)) == (segment > 1)


@pytest.mark.parametrize("copies", ["fast", "slow"])
def test_boundaries_are_computed_again_where_copies_take_longer(copies: str) -> None:
    """The device has room for some of them."""
    structure, activations = qwen(24, 4096, hidden=1024, heads=8, kv_heads=2, inner=2048)
    request = replace(REQUEST, micro_batch_size=1, num_micro_batches=8, seq_len=4096)
    slow = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s"), 2e9)
    rates = replace(MACHINE.rates, **slow) if copies == "slow" else MACHINE.rates
    plan = make_plan(structure, activations, replace(MACHINE, hbm_bytes=4600 << 20, profile=rates), request)
    assert plan.prediction
    assert (len(plan.replayed_layers), plan.host_boundary_bytes > 0) == ((12, False) if copies == "slow" else (0, True))
    assert ("replay" in plan.prediction.compute_s) == (copies == "slow")


@pytest.mark.parametrize(
    ("freeze", "lowest"), [(("embed",), 1), (("embed", r"layers\.0\."), 2), ((r"layers\.0\.",), 0)]
)
def test_what_enters_the_lowest_trained_layer_stays(freeze: tuple[str, ...], lowest: int) -> None:
    """Nothing before it needs a gradient, so it is no port of its call. A frozen layer above it hands one on."""
    structure, activations = model(rules=ParameterRules(freeze=freeze))
    candidate = Candidate(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, 2, 1, boundaries=Tier.HOST)
    plan = build_plan(structure, activations, MACHINE, replace(REQUEST, num_micro_batches=16), candidate)
    one, num_away = BATCH * SEQ * HIDDEN * 2, LAYERS - lowest
    assert [layer.boundary is Tier.HOST for layer in plan.layers] == [lowest < i <= LAYERS for i in range(LAYERS + 2)]
    assert rows(plan, Tier.HOST)["boundary activations"] == plan.host_boundary_bytes == 16 * num_away * one
    staying = 16 if lowest else 0
    assert rows(plan, Tier.HBM)["boundary activations"] == (staying + 16 + 2) * one


def test_thousands_of_shards_take_no_time() -> None:
    """What a plan costs is of the model, whatever the number of shards."""
    structure, activations = model()
    machine = replace(MACHINE, ram_bytes=8 << 40)
    start = time.process_time()
    many = make_plan(structure, activations, machine, replace(REQUEST, num_shards=5000))
    assert time.process_time() - start < 2.0
    one = make_plan(structure, activations, machine, replace(REQUEST, num_shards=1))
    assert (many.shards.num_shards, many.shards.num_threads) == (5000, 1)
    assert rows(many, Tier.HOST)["processes"] == (4 + 5000) * PROCESS_BYTES + BESIDE_GPU_BYTES
    for name in ("working copy", "optimizer state", "gradients in waiting"):
        assert rows(many, Tier.HOST)[name] == rows(one, Tier.HOST)[name]


def test_on_the_cpu_device_memory_is_host_memory() -> None:
    structure, activations = model()
    plan = make_plan(structure, activations, replace(MACHINE, device="cpu"), REQUEST)
    need = plan.total_bytes(Tier.HOST) + plan.total_bytes(Tier.HBM)
    assert f"\nhost{format_bytes(need):>18}   of 64.00 GiB" in describe(plan)
    machine = replace(MACHINE, device="cpu", ram_bytes=need - plan.saves.copy_bytes - 1)
    smaller = make_plan(structure, activations, machine, REQUEST)
    assert smaller.total_bytes(Tier.HOST) + smaller.total_bytes(Tier.HBM) < need
    assert smaller.slots != plan.slots or smaller.layers != plan.layers


@pytest.mark.parametrize(
    ("candidate", "compiled", "told"),
    [
        (KEEP, {}, "keep      activations of 6 layers; recompute those of 0"),
        (RECOMPUTE, {}, "keep      activations of 2 layers; recompute those of 4"),
        (KEEP, {"compiled": True, "activation_budget": 0.2}, "keep      activations of 2 layers; part of those of 4;"),
        (KEEP, {"compiled": True}, "keep      activations of 6 layers; recompute those of 0"),
    ],
)
def test_what_is_kept_is_told(candidate: ActivationPolicy, compiled: dict[str, Any], told: str) -> None:
    where = Candidate(LoopOrder.MICRO_BATCHES_OUTER, candidate, 2, 1)
    plan = build_plan(*model(), MACHINE, REQUEST, where)
    first, *blocks, last = plan.layers
    plan = replace(plan, layers=(first, *(replace(block, **compiled) for block in blocks), last))
    assert f"\n{told}" in describe(plan)


def test_the_plan_survives_json() -> None:
    structure, activations = model(tied=True)
    request = replace(REQUEST, num_micro_batches=2, num_fragments=3, round_gradients=True)
    plan = make_plan(structure, activations, replace(MACHINE, hbm_bytes=100 << 30), request)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.slots.rounded_bytes


def test_unclipped_gradients_do_not_wait() -> None:
    structure, activations = model()
    clipped = make_plan(structure, activations, MACHINE, REQUEST)
    unclipped = make_plan(structure, activations, MACHINE, replace(REQUEST, clip=False))
    assert unclipped.gradients.slab_bytes < clipped.gradients.slab_bytes
    assert list(unclipped.layer_order) == list(reversed(clipped.layer_order))


def test_a_plan_of_a_model_far_larger_than_this_machine_takes_no_memory() -> None:
    """14.8 billion parameters: the plan needs neither weights nor a GPU."""
    config = LlamaConfig(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
        vocab_size=152064, max_position_embeddings=4096,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> object:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    structure, activations = discover(factory, torch.bfloat16, 1, 1024)  # type: ignore[arg-type]
    machine = replace(MACHINE, ram_bytes=512 << 30, hbm_bytes=139 << 30)
    request = replace(REQUEST, micro_batch_size=1, num_micro_batches=8, seq_len=1024)
    plan = make_plan(structure, activations, machine, request)
    parameters = sum(layer.num_parameters for layer in plan.layers)
    assert 14.7e9 < parameters < 14.8e9
    assert rows(plan, Tier.HOST)["optimizer state"] == pytest.approx(10 * parameters, rel=1e-3)


def test_layers_that_live_on_the_device() -> None:
    """12 bytes a parameter and the gradient there, none of it on the host; what moves over the bus is the rest."""
    structure, activations = model()
    without = make_plan(structure, activations, MACHINE, REQUEST)
    plan = make_plan(structure, activations, MACHINE, replace(REQUEST, hbm_layers=3))
    sizes = [layer.size for layer in structure.layout().layers]
    hbm, host = rows(plan, Tier.HBM), rows(plan, Tier.HOST)
    assert plan.hbm_layers == {0, 1, 2}
    assert [layer.updated_by for layer in plan.layers] == ["gpu"] * 3 + ["cpu"] * 3
    assert hbm["layers in HBM"] == 12 * sum(sizes[:3])
    assert hbm["gradients in HBM"] == 0, "they come as activations go"
    assert host["working copy"] == 2 * sum(sizes[3:])
    assert host["optimizer state"] == 10 * sum(sizes[3:])
    assert host["gradients in waiting"] == plan.gradients.slab_bytes == 2 * sum(sizes[3:])
    assert plan.layer_order == (3, 4, 5)
    assert plan.slots.num_uploads < without.slots.num_uploads
    assert plan.save_bytes == without.save_bytes


@pytest.mark.parametrize("clip", [True, False])
def test_all_layers_on_the_device(clip: bool) -> None:
    structure, activations = model(tied=True)
    plan = make_plan(structure, activations, MACHINE, replace(REQUEST, hbm_layers=LAYERS + 2, clip=clip))
    assert (plan.slots.weights, plan.slots.gradient_bytes, plan.gradients.slab_bytes, plan.slots.num_uploads) == (
        (),
        (),
        0,
        0,
    )
    with pytest.raises(ConfigError, match=r"hardware\.hbm_layers: 7 .* only 6 of 6"):
        make_plan(structure, activations, MACHINE, replace(REQUEST, hbm_layers=LAYERS + 3))


def test_the_device_is_filled_from_the_first_layer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layers live on the device as fit under 97 % of its memory; none on a CPU, none that Muon trains.

    Updates need no launches here: they would take longer than the CPU's updates of layers as small as these.
    """
    monkeypatch.setattr(layer_costs, "UPDATE_LAUNCHES", 0)
    structure, activations = model()
    sizes = [
        make_plan(structure, activations, MACHINE, replace(REQUEST, hbm_layers=count)).total_bytes(Tier.HBM)
        for count in range(LAYERS + 3)
    ]
    assert sizes == sorted(sizes)
    for count, num_bytes in enumerate(sizes):
        machine = replace(MACHINE, hbm_bytes=math.ceil(num_bytes / 0.97))
        plan = make_plan(structure, activations, machine, replace(REQUEST, hbm_layers=None, captured=False))
        assert plan.hbm_layers == set(range(count))
    on_cpu = make_plan(structure, activations, replace(MACHINE, device="cpu"), replace(REQUEST, hbm_layers=None))
    assert on_cpu.hbm_layers == frozenset()
    muon = make_plan(*model(rules=ParameterRules(muon=True)), MACHINE, replace(REQUEST, hbm_layers=None))
    assert muon.hbm_layers == {0, LAYERS + 1}


@pytest.mark.parametrize("clip", [True, False])
def test_a_plan_says_how_many_tokens_hide_the_updates(clip: bool) -> None:
    """With so many they are hardly waited for; with the tokens that it has, most of the time."""

    def waiting(plan: Plan) -> float:
        assert plan.prediction
        return plan.prediction.exposed_s["optimizer"] / plan.prediction.step_s

    plan = planned(PROFILE, clip=clip)
    assert waiting(plan) > 0.4
    found = re.search(r"would hide behind the (\w+) from about ([\d.]+)k tokens a step on", describe(plan))
    assert found and found[1] == ("forward" if clip else "backward")
    enough = planned(PROFILE, clip=clip, num_micro_batches=round(1000 * float(found[2]) / plan.step.seq_len))
    assert waiting(enough) < 0.1
    assert "would hide" not in describe(planned(PROFILE, clip=clip, num_micro_batches=64))


def test_without_clipping_the_first_layers_are_updated_last_if_all_gradients_have_room() -> None:
    plan, clipped = planned(PROFILE, clip=False), planned(PROFILE)
    late = plan.step.num_updated_late
    assert 0 < late < len(plan.layers) and not clipped.step.num_updated_late
    assert plan.layer_order == (*range(len(plan.layers) - 1, late - 1, -1), *range(late))
    assert plan.gradients.slab_bytes == clipped.gradients.slab_bytes
    assert f"in backward order, the first {late} layers last, in forward order" in describe(plan)
    machine = replace(planned_steps.MACHINE, ram_bytes=planned_steps.MACHINE.ram_bytes - spare_ram(plan) - 1)
    tight = make_plan(*planned_steps.shape(), machine, replace(planned_steps.REQUEST, clip=False))
    assert plan.prediction and tight.prediction and not tight.step.num_updated_late
    assert plan.prediction.step_s < 0.95 * tight.prediction.step_s
