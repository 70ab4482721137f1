"""Compiled layers: what a budget keeps, what cannot be compiled, and that nothing else of a step changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.activations import activation_store
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.compile_trial import ACTIVATION_BUDGETS, CompileTrial
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.candidates import candidates
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import ConfigError
from megatrain_ray.planning.run_spec import prepare
from tests.engine.planner.test_planner import MACHINE, REQUEST
from tests.support.candidate_plans import build_plan
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, train_engine
from tests.support.runs import config
from tests.support.tiny import weigh

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
# Losses and norms of FP32 beside those of uncompiled layers, over two steps of every model below: kernels sum in
# another order. Measured: 7e-8 on one CPU with torch 2.13.
BOUND = 1e-6

needs_traced_experts = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="experts of Transformers 5.17 are not one graph"
)


def factory_of(shape: Any) -> ModelFactory:
    def factory(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_config(shape, dtype=dtype)

    return factory


def trials_of(shape: Any, batch: tuple[int, int] = (1, 8), dtype: torch.dtype = torch.float32) -> list[CompileTrial]:
    """Return the compile trials of the blocks."""
    _, activations = discover(factory_of(shape), dtype, *batch, compiled=True)
    return [trial for trial in activations.compiled if trial is not None]


@pytest.mark.parametrize(
    ("hidden_size", "heads", "kv_heads", "inner", "measured", "backward_gb"),
    [
        (
            3584, 28, 4, 18944, {1.0: 159, 0.8: 107, 0.4: 67.7, 0.2: 30.8, 0.05: 14.3, 0.0: 7.2},
            {0.4: 4.213, 0.2: 4.230, 0.05: 4.347, 0.0: 4.347},
        ),
        (
            5120, 40, 8, 13824, {1.0: 149, 0.8: 101, 0.4: 65.5, 0.2: 37.9, 0.05: 14.3, 0.0: 10.2},
            {0.8: 3.291, 0.2: 3.627, 0.05: 3.627, 0.0: 3.627},
        ),
    ],
    ids=["7B", "14B"],
)  # fmt: skip
def test_what_a_budget_keeps_is_what_a_gpu_was_measured_to_keep(
    hidden_size: int, heads: int, kv_heads: int, inner: int, measured: dict[float, float],
    backward_gb: dict[float, float],
) -> None:  # fmt: skip
    """What a compiled layer of Qwen2.5 took on an H200 at each budget.

    measured: KB a token that it saved, inputs included.
    backward_gb: most that its backward held, with what was kept besides inputs.
    """
    shape = Qwen2Config(
        hidden_size=hidden_size, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
        num_hidden_layers=2, vocab_size=1000,
    )  # fmt: skip
    num_tokens = 16 * 1024
    first, second = trials_of(shape, (16, 1024), torch.bfloat16)
    assert first is second, "traced once for both layers"
    inputs = hidden_size * 2
    kept = {cost.activation_budget: (cost.kept_bytes / num_tokens + inputs) / 1000 for cost in first.budgets}
    assert {budget: kept[budget] for budget in measured} == pytest.approx(measured, rel=0.1)
    assert tuple(cost.activation_budget for cost in first.budgets) == ACTIVATION_BUDGETS
    for cost in first.budgets:
        if most := backward_gb.get(cost.activation_budget):
            assert 0.999 * most < max(a + w for a, w, _ in cost.backward) / 1e9 < 1.06 * most
    attended = 2 * hidden_size * (hidden_size + hidden_size // heads * kv_heads)
    forward = 2 * num_tokens * (attended + 3 * hidden_size * inner)
    recomputed = [cost.recomputed_flops / forward for cost in first.budgets]
    assert recomputed[0] == 0.0
    assert recomputed == sorted(recomputed)
    assert 0.7 < recomputed[-1] < 0.8, "the down projection, a quarter of all, is not computed again"


def test_a_layer_that_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def branching(self: Any, x: torch.Tensor) -> torch.Tensor:
        up: torch.Tensor = self.up_proj(x)
        return self.down_proj(up if up.sum() > 0 else -up)  # type: ignore[no-any-return]

    monkeypatch.setattr(LlamaMLP, "forward", branching)
    (trial, *_) = trials_of(TINY)
    assert trial.budgets == ()
    assert trial.problem is not None
    assert trial.problem.startswith("Unsupported: Data-dependent branching. ")


def test_a_layer_that_reads_its_position_is_not_compiled_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaAttention.forward

    def scaled(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, hidden_states / (self.layer_idx + 1), **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", scaled)
    assert {trial.problem for trial in trials_of(TINY)} == {"what it computes depends on layer_idx"}


def test_a_layer_with_dropout_keeps_all_or_is_not_compiled() -> None:
    """What torch's partitioner lets the backward compute again draws other random numbers: gradients would be wrong."""
    shape = LlamaConfig(**TINY.to_diff_dict() | {"attention_dropout": 0.1})
    structure, activations = discover(factory_of(shape), torch.float32, 2, 8, compiled=True)
    assert [cost.activation_budget for cost in activations.budgets_of(1)] == [1.0]
    request = replace(REQUEST, compiled=True)
    by_budget = {c.activation_budget: c for c in reversed([*candidates(structure, request)])}
    whole, less = (build_plan(structure, activations, MACHINE, request, by_budget[b]).layers[1] for b in (1.0, 0.8))
    assert (whole.compiled, whole.activations) == (True, ActivationPolicy.KEEP)
    assert (less.compiled, less.activations) == (False, ActivationPolicy.RECOMPUTE)


def compiled_plans() -> tuple[ModelStructure, ActivationBytes, Request]:
    structure, activations = discover(factory_of(TINY), torch.bfloat16, 2, 64, compiled=True)
    return structure, activations, replace(REQUEST, compiled=True)


def test_less_device_memory_makes_smaller_budgets() -> None:
    structure, activations, request = compiled_plans()
    found = []
    for candidate in candidates(structure, request):
        plan = build_plan(structure, activations, MACHINE, request, candidate)
        blocks = plan.layers[1:-1]
        assert {(layer.compiled, layer.activations) for layer in blocks} == {(True, ActivationPolicy.KEEP)}
        assert not plan.layers[0].compiled
        assert plan.compute.compiled_loss
        found.append((blocks[0].activation_budget, plan))
    assert list(dict.fromkeys(budget for budget, _ in found)) == list(ACTIVATION_BUDGETS)
    smallest = min((plan for _, plan in found), key=lambda plan: plan.total_bytes(Tier.HBM))
    assert smallest.layers[1].activation_budget == 0.0
    limited = replace(MACHINE, hbm_bytes=smallest.total_bytes(Tier.HBM))
    chosen = make_plan(structure, activations, limited, request)
    assert chosen.layers[1].activation_budget == 0.0
    assert Plan.from_json(chosen.to_json()) == chosen


def test_the_plan_counts_what_a_budget_keeps() -> None:
    structure, activations, request = compiled_plans()
    plan = make_plan(structure, activations, MACHINE, request)
    live = plan.step.num_micro_batches if plan.step.order.value == "layers_outer" else 1
    kept = next(row.num_bytes for row in plan.memory_items if row.name == "kept activations")
    assert kept == live * (activations.kept[0] + sum(activations.kept_within(i, 1.0) for i in (1, 2, 3)))


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cpu", {}, False),
        ("cpu", {"hardware__compile": True}, True),
        ("cuda", {}, True),
        ("cuda", {"train__deterministic": True}, False),
        ("cuda", {"hardware__compile": False}, False),
    ],
)
def test_auto_compiles_on_a_gpu(tmp_path: Path, device: str, changes: dict[str, Any], expected: bool) -> None:
    hbm_bytes = 80 << 30 if device == "cuda" else None
    machine = Machine(device=device, num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=hbm_bytes)
    shape = TINY.to_dict() | {"vocab_size": 264}
    tree = config(tmp_path, shape, data__seq_len=16, hardware__device=device, **changes)
    plan = prepare(TrainConfig.model_validate(tree).resolve(), machine).plan
    assert [layer.compiled for layer in plan.layers] == [False, *[expected] * 3, False]
    assert plan.compute.compiled_loss is expected


def test_another_value_is_refused_in_one_line(tmp_path: Path) -> None:
    tree = config(tmp_path, TINY.to_dict(), hardware__compile="yes")
    with pytest.raises(ConfigError) as refused:
        TrainConfig.model_validate(tree)
    assert str(refused.value) == "hardware.compile: expected auto, true or false, got 'yes'"


@pytest.mark.spread(1)
@pytest.mark.timeout(900)  # a C++ compiler at work, several minutes where other processes have the cores
@pytest.mark.parametrize(
    ("name", "budget", "segment", "kept"),
    [
        pytest.param("Llama, tied", 0.4, 1, Tier.HOST, id="tied, kept on the host"),
        pytest.param("GPT-2", 1.0, 2, Tier.HOST, id="dropout, segments, kept on the host"),
        pytest.param("Mixtral", 0.0, 3, Tier.HBM, id="router logits, segments", marks=needs_traced_experts),
    ],
)
def test_a_step_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, budget: float, segment: int, kept: Tier,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Compiled layers compute the same while slots are reused.

    Released slots are NaN, and layers come back at other addresses. All run the graph that was compiled for the first,
    with the same dropout where they run twice.
    """
    caplog.set_level(logging.INFO, "megatrain_ray.engine")
    monkeypatch.setattr(activation_store, "SMALL_BYTES", 1)  # all of these are
    build_family(name, tmp_path)
    batches, recipe = list(map(weigh, family_batches(2))), Recipe(2, seed=3)
    held_out = batches[:1] if name == "Llama, tied" else []
    torch._dynamo.utils.counters.clear()
    mode = Mode(activation_budget=budget, num_fragments=3, segment=segment, kept=kept)
    ours = train_engine(tmp_path, batches, recipe, mode, held_out=held_out)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    theirs = train_engine(tmp_path, batches, recipe, Mode(), held_out=held_out)
    assert [layer.activation_budget for layer in ours.plan.layers] == [1.0, budget, budget, budget, 1.0]
    assert ours.plan.replayed_layers == ({i for i in (1, 2) if i % segment})
    assert (ours.moved("kept") > 0) is (kept is Tier.HOST)
    assert not [record.message for record in caplog.records if "uncompiled" in record.message]
    assert graphs == (3 if held_out else 2) + 1, "one for the plan, one to train, one to evaluate; the loss"
    assert ours.losses == pytest.approx(theirs.losses, rel=BOUND)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=BOUND)
    assert ours.evaluations == pytest.approx(theirs.evaluations, rel=BOUND)
    if held_out:
        torch._dynamo.utils.counters.clear()
        alone = train_engine(tmp_path, [], recipe, mode, held_out=held_out)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for the plan, one to evaluate"
        assert alone.evaluations == ours.evaluations[:1]


# Of so long a sequence attention's own result is a small part of what its layer keeps, and most of its work.
LONG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096,
)  # fmt: skip


def test_attention_of_long_sequences_is_the_first_to_be_kept() -> None:
    (trial,) = trials_of(LONG, (1, 4096), torch.bfloat16)
    again = {cost.activation_budget: cost.of_attention for cost in trial.budgets}
    assert again[0.0] > 0
    assert not any(flops for budget, flops in again.items() if budget >= 0.2)


@pytest.mark.parametrize(("budget", "times"), [(0.0, 2), (0.2, 1)])
def test_a_compiled_backward_attends_again_only_as_the_trial_says(budget: float, times: int) -> None:
    up, down = torch.randn(16, 256, requires_grad=True), torch.randn(256, 16, requires_grad=True)

    def attended(x: torch.Tensor) -> torch.Tensor:
        mixed = torch.nn.functional.scaled_dot_product_attention(x.sin(), x.cos(), x.exp(), is_causal=True)
        return (mixed @ up).sin() @ down

    call = CompiledCall("a test's", attended, budget)
    hidden = torch.randn(1, 2, 512, 16, requires_grad=True)
    with call.rehearsal():
        call(hidden).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call(hidden).sum().backward()
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert sum(event.name == forward for event in profile.events() or ()) == times
