"""What plans count of the last norm's backward, beside the tensors that there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.memory.work_bytes import norm_bytes
from megatrain_ray.engine.planner.search.make_plan import make_plan
from tests.engine.layer_calls.test_compiled_layers import factory_of
from tests.engine.planner.test_planner import MACHINE, REQUEST
from tests.support.live_bytes import Live

TOKENS, WIDTH = 64, 256
SHAPE = Qwen2Config(
    hidden_size=WIDTH, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
    vocab_size=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def plan_and_activations() -> tuple[Plan, ActivationBytes]:
    structure, activations = discover(factory_of(SHAPE), torch.bfloat16, 1, TOKENS, chunked=True)
    request = replace(REQUEST, micro_batch_size=1, num_micro_batches=1, seq_len=TOKENS)
    return make_plan(structure, activations, MACHINE, request), activations


def test_what_a_norms_backward_holds_is_counted(plan_and_activations: tuple[Plan, ActivationBytes]) -> None:
    plan, activations = plan_and_activations
    norm = Qwen2RMSNorm(WIDTH).to(torch.bfloat16)
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn_like(hidden)
    with Live(hidden, gradient) as live:
        torch.autograd.grad(norm(hidden), [hidden, *norm.parameters()], gradient)
    assert norm_bytes(plan, activations) == pytest.approx(live.most, rel=0.02)


def test_in_chunks_it_is_that_of_one(plan_and_activations: tuple[Plan, ActivationBytes]) -> None:
    plan, activations = plan_and_activations
    in_chunks = replace(activations, images=7).times(2).in_chunks()
    assert in_chunks is not None and in_chunks.images == 14, "features of images exist whole"
    in_chunks = activations.in_chunks()
    assert in_chunks is not None
    assert in_chunks.kept[-1] == 0
    boundaries = 3 * activations.boundary[-1]
    whole = norm_bytes(plan, activations) - boundaries
    assert (
        norm_bytes(replace(plan, compute=replace(plan.compute, mlp_chunk_tokens=TOKENS // 4)), in_chunks)
        == boundaries + whole // 4
        > boundaries
    )
