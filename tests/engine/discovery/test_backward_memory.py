"""The simulated memory of compiled backwards: hand-counted graphs, and what GPUs were measured to take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_ray.engine.discovery.backward_memory import Moment, backward_moments
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.model.architecture import Architecture

TOKENS, WIDTH = 1 << 14, 1 << 10
ACTIVATION, WEIGHT = 4 * TOKENS * WIDTH, 4 * WIDTH * WIDTH


def moments_of(function: Callable[..., torch.Tensor], *others: tuple[int, ...]) -> tuple[Moment, ...]:
    """Return the moments of a function of activations [TOKENS, WIDTH] and of weights with the other shapes, in FP32."""
    found: list[tuple[Moment, ...]] = []

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        parts = min_cut_rematerialization_partition(joint, inputs, **options)
        found.append(backward_moments(parts[1].graph, *inputs, {torch.Size(shape) for shape in others}))
        return parts

    with FakeTensorMode():
        tensors = [torch.empty(shape, requires_grad=True) for shape in ((TOKENS, WIDTH), *others)]
        traced = aot_function(function, lambda graph, _: make_boxed_func(graph), partition_fn=partition)
        traced(*tensors).sum().backward()
    return found[0]


def test_a_product_holds_the_gradients_of_its_inputs() -> None:
    (moment,) = moments_of(torch.mm, (WIDTH, WIDTH))
    assert moment == (ACTIVATION, WEIGHT, False), "its inputs and the gradient of its output are given"


def test_results_of_one_kernel_are_there_together_with_what_it_reads() -> None:
    """Of a gated product the backward reads both factors and writes both gradients in one kernel."""

    def gated(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, first) * torch.mm(x, second).sigmoid()

    most = max(moments_of(gated, (WIDTH, WIDTH), (WIDTH, WIDTH)))
    assert most == (4 * ACTIVATION, 0, False)


def test_experts_take_no_more_than_was_simulated() -> None:
    """Qwen3-30B-A3B with 64 × 1024 tokens held 8.23 GB on an H100, beyond what its last layer kept (budget 0.05)."""
    shape = {
        "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 2048, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 1024,
    }  # fmt: skip
    beyond = held_beyond(shape, Attention.SDPA, 0.05)
    assert 8.23 < beyond / 1e9 < 1.15 * 8.23


def test_flex_attention_takes_no_memory_for_scores() -> None:
    """GPT-OSS-20B with 64 × 1024 tokens held 14.07 GB on an H100 (budget 0.0). Eager attention would hold 38."""
    shape = {
        "model_type": "gpt_oss", "vocab_size": 1000, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }  # fmt: skip
    beyond = held_beyond(shape, Attention.FLEX, 0.0)
    assert 14.07 < beyond / 1e9 < 1.1 * 14.07


def held_beyond(shape: dict[str, Any], attention: Attention, budget: float) -> int:
    """Return the bytes that the backward of a block holds with 64 × 1024 tokens, beyond what was kept."""
    _, activations = discover(Architecture(shape), torch.bfloat16, 1, 1024, attention=attention, compiled=True)
    activations = activations.times(64)
    return activations.backward_within(1, budget, 0) - activations.kept_within(1, budget)
