"""How many tokens of the loss at a time: as many as cost no memory that is not there at another time anyway."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.op_costs import Prices
from megatrain_ray.engine.planner.cost.predict_step import predict, predict_evaluation
from megatrain_ray.engine.planner.memory.chunk_sizes import (
    LOGITS_BYTES,
    LOSS_CHUNK_TOKENS,
    MAX_LOGITS,
    chunk_tokens,
    loss_bytes,
    may_be_small,
)
from megatrain_ray.engine.planner.memory.device_bytes import (
    activation_rows,
    waiting_row,
)
from megatrain_ray.engine.planner.memory.work_bytes import backward_bytes_by_layer, bytes_held_during_loss
from megatrain_ray.engine.planner.request import Candidate, Machine, ObjectiveBytes, Request
from megatrain_ray.planning.run_spec import objective_bytes
from tests.support.candidate_plans import build_plan
from tests.support.shapes import qwen

MACHINE = Machine(device="cuda", num_cpus=16, num_nodes=1, ram_bytes=1 << 41, hbm_bytes=None, profile=TYPICAL_GPU)
CANDIDATE = Candidate(LoopOrder.MICRO_BATCHES_OUTER, ActivationPolicy.RECOMPUTE, 3, 2)
VOCAB = 152064
NOTHING = ObjectiveBytes()


@cache
def shape() -> tuple[Any, ActivationBytes]:
    return qwen(4, 1024, hidden=2048, heads=16, kv_heads=2, inner=8192)  # type: ignore[no-any-return]


def planned(sequences: int, **changes: Any) -> Plan:
    structure, activations = shape()
    request = Request(Precision.BF16, False, True, sequences, 1, 1024, compiled=True)
    return build_plan(structure, activations.times(sequences), MACHINE, replace(request, **changes), CANDIDATE)


def test_chunks_below_32_bits() -> None:
    assert 8192 * VOCAB < MAX_LOGITS < 16384 * VOCAB


@pytest.mark.parametrize("backward_gib", [0, 1, 2, 5, 11, 1000])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_chunk_takes_what_a_backward_takes(backward_gib: int, num_micro_batches: int) -> None:
    """A chunk may also take what a plan gives the loss in any case.

    Chunks are equal, and 32 bits can count their elements.
    """
    structure, layout = shape()[0], shape()[0].layout()
    plan, held, backward = planned(64, num_micro_batches=num_micro_batches), 1 << 28, backward_gib << 30

    def tokens_of(num_bytes: int) -> int:
        return chunk_tokens(plan, structure, layout, held=held, backward=num_bytes, objective=NOTHING)

    def bytes_of(tokens: int) -> int:
        chunked = replace(plan, compute=replace(plan.compute, loss_chunk_tokens=tokens))
        return loss_bytes(chunked, structure, layout, NOTHING, held=held)

    tokens = tokens_of(backward)
    assert tokens % LOSS_CHUNK_TOKENS == 0
    assert 64 * 1024 % tokens == 0
    assert tokens * VOCAB <= MAX_LOGITS
    assert tokens_of(0) == 1024
    assert 1024 * VOCAB * 4 <= LOGITS_BYTES < 2048 * VOCAB * 4
    assert tokens == 1024 or bytes_of(tokens) <= backward
    assert tokens == 8192 or bytes_of(2 * tokens) > backward, "with twice as many there were more"


def test_a_teacher_makes_chunks_shorter_and_has_a_row() -> None:
    plan = planned(64, objective=ObjectiveBytes(8, 516))
    assert plan.compute.loss_chunk_tokens < planned(64).compute.loss_chunk_tokens
    (row,) = (item for item in plan.memory_items if item.name == "teacher's predictions")
    assert row.num_bytes == 64 * 1024 * 516


def test_objectives_over_log_probabilities_take_what_cross_entropy_takes() -> None:
    """On the device and on the host, row by row; tests/engine/model/test_chunked_loss.py measures the chunks."""
    for objective in ("dpo", "simpo", "kto", "grpo"):
        train = OptimizationConfig(objective=objective)
        of_logits = objective_bytes(train, VOCAB, compiled=True)
        plan = planned(64, objective=of_logits, scores_in_step=True, scores_first=train.estimates_kl)
        assert plan == planned(64), "with chunks as long"
    assert plan.compute.compiled_loss
    assert 8 * plan.compute.score_chunk_tokens == 4 * plan.compute.loss_chunk_tokens, "bytes of a logit × tokens"


def test_small_logits_take_a_small_share_of_a_small_device() -> None:
    structure, layout, plan = shape()[0], shape()[0].layout(), planned(64)

    def tokens_of(gib: int) -> int:
        limited = replace(plan, limits=replace(plan.limits, hbm_bytes=gib << 30))
        return chunk_tokens(limited, structure, layout, held=0, backward=0, objective=NOTHING, small=True)

    assert [tokens_of(gib) for gib in (4, 9, 15)] == [128, 256, 512]
    assert [may_be_small(gib << 30) for gib in (4, 9, 15, 16, 80)] == [True, True, True, False, False]


@pytest.mark.parametrize("seq_len", [14123, 28195, 28232, 40001])
def test_chunks_of_rows_of_any_length_stay_below_32_bits(seq_len: int) -> None:
    structure, layout = shape()[0], shape()[0].layout()
    plan = replace(planned(64), step=replace(planned(64).step, micro_batch_size=1, seq_len=seq_len))
    tokens = chunk_tokens(plan, structure, layout, held=0, backward=1000 << 30, objective=NOTHING)
    assert tokens % LOSS_CHUNK_TOKENS == 0
    assert tokens * VOCAB <= MAX_LOGITS


def test_the_planned_chunk_is_hidden_behind_the_backward() -> None:
    structure, activations = shape()
    activations = activations.times(64)
    plan, layout = planned(64), structure.layout()
    backward = max(backward_bytes_by_layer(plan, layout, activations))
    of_loss = loss_bytes(plan, structure, layout, NOTHING, held=bytes_held_during_loss(plan, activations))
    assert planned(1).compute.loss_chunk_tokens == 1024
    assert 0.5 * backward < of_loss <= backward


def test_larger_chunks_are_predicted_to_be_faster() -> None:
    structure, activations = shape()
    basis = CostBasis(structure, structure.layout(), work_of(structure), TYPICAL_GPU, True, 0)

    def seconds(tokens: int, basis: CostBasis = basis) -> float:
        plan = replace(planned(64), compute=replace(planned(64).compute, loss_chunk_tokens=tokens))
        return Prices(plan, basis, activations.times(64)).layers.of_layer("loss", len(plan.layers) - 1)

    assert seconds(1024) > seconds(4096) > seconds(8192)
    # KTO's forward before a step.
    plan, whole = planned(64), activations.times(64)
    alone, with_scores = (predict(plan, replace(basis, scores_first=first), whole) for first in (False, True))
    assert with_scores.step_s == pytest.approx(alone.step_s + predict_evaluation(plan, basis, whole))
    assert with_scores.step_s == pytest.approx(
        sum(with_scores.compute_s.values()) + sum(with_scores.exposed_s.values())
    )
    # Of pairs the head runs forward twice: a third more products, and the scores' traffic.
    assert 1.3 * seconds(8192) < seconds(8192, replace(basis, scores_in_step=True, prices={})) < 2 * seconds(8192)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_backward_takes_the_place_of_activations_that_are_gone_by_then(num_micro_batches: int) -> None:
    """With several micro-batches inputs have settled: what they leave is for gradients only."""
    structure, activations = shape()
    layout, activations = structure.layout(), activations.times(64)
    plan = planned(64, num_micro_batches=num_micro_batches)
    plan = replace(plan, step=replace(plan.step, order=LoopOrder.LAYERS_OUTER))
    keeps = (False, False, False, True, True, False)
    policies = (ActivationPolicy.KEEP if keep else ActivationPolicy.RECOMPUTE for keep in keeps)
    layers = tuple(replace(layer, activations=policy) for layer, policy in zip(plan.layers, policies, strict=True))
    plan = replace(plan, layers=layers, gradients=replace(plan.gradients, sums=Tier.HOST))
    assert plan.gradients_allocated_on_demand and plan.settles == (num_micro_batches > 1)
    alone = backward_bytes_by_layer(plan, layout, activations)
    rows = activation_rows(plan, structure, layout, activations, NOTHING)
    kept, entering = (num_micro_batches * num_bytes for num_bytes in (activations.kept[3], layers[3].boundary_bytes))
    # Blocks 1 to 4. The input of the block behind each has made way for its gradient.
    inputs, of_kept = [3 * entering, 2 * entering, entering, 0], [2 * kept, 2 * kept, kept, 0]
    assert rows.rows["work"][0] == alone[4]
    if plan.settles:
        assert rows.beyond == (-4 * entering, *(-b for b in inputs), 0)
        assert rows.held == (0, *4 * [entering], entering)
    else:
        gone = [a + b for a, b in zip(inputs, of_kept, strict=True)]
        assert list(rows.beyond[1:5]) == [a - b - alone[4] for a, b in zip(alone[1:], gone, strict=True)]
    sizes = [plan.gradients.accumulate_dtype.itemsize * size for size in layout.trained_sizes]
    row, _ = waiting_row(plan, layout, rows, frozenset(range(6)), frozenset())
    assert row == max(beyond + sum(sizes[i:]) for i, beyond in enumerate(rows.beyond)) > 0
