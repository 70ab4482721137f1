"""Model FLOPs counted by hand: what one token is multiplied with, and what attention multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.flat_layout import ParameterSpec
from megatrain_ray.engine.model.flops import BlockAttention, work_of
from megatrain_ray.engine.model.parameter_rules import ALL_ALIKE, ParameterRules
from megatrain_ray.engine.model.structure import LayerKind, LayerSpec, ModelStructure
from megatrain_ray.model.flop_count import FlopCount
from megatrain_ray.model.model_source import ModelSource
from tests.support.families import FAMILIES

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 48, 112, 3, 4, 2, 264
LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
}  # fmt: skip


def counted(config: dict[str, Any], seq_len: int = 24, rules: ParameterRules = ALL_ALIKE) -> FlopCount:
    source = ModelSource(config, None, 0)
    structure, _ = discover(source.factory, torch.float32, 2, seq_len, rules)
    return FlopCount.of(structure, source)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_dim", [HIDDEN // HEADS, 16])
def test_a_dense_model(tied: bool, head_dim: int) -> None:
    """A tied head multiplies as an untied one does; the embedding multiplies never, nor do norms."""
    flops = counted(LLAMA | {"tie_word_embeddings": tied, "head_dim": head_dim})
    d_attn, d_kv = HEADS * head_dim, KV_HEADS * head_dim
    block = 2 * HIDDEN * d_attn + 2 * HIDDEN * d_kv + 3 * HIDDEN * INNER  # q and o, k and v, MLP
    num_matmul = LAYERS * block + VOCAB * HIDDEN
    assert flops == FlopCount(6 * num_matmul, (BlockAttention(d_attn, None),) * LAYERS)
    lengths = (32, 32, 20)
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    assert flops.per_step(tokens, squares) == 6 * num_matmul * tokens + 6 * LAYERS * d_attn * squares


def test_a_head_dim_that_is_not_given_is_hidden_over_heads() -> None:
    assert counted(LLAMA).attention[0].width == HIDDEN


def test_what_is_frozen_is_not_counted() -> None:
    """A forward of everything, what goes on to the inputs down to the lowest trained layer, gradients of the rest."""
    flops = counted(LLAMA, rules=ParameterRules(freeze=("embed", r"layers\.0\.", "mlp")))
    attention, mlp = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2, 3 * HIDDEN * INNER
    of_token = 2 * (attention + mlp) + 2 * (6 * attention + 4 * mlp) + 6 * VOCAB * HIDDEN
    forward, both = BlockAttention(HIDDEN, None, 1), BlockAttention(HIDDEN, None, 3)
    assert flops == FlopCount(of_token, (forward, both, both))
    assert flops.per_step(10, 50) == of_token * 10 + 2 * (1 + 3 + 3) * HIDDEN * 50


# The published shapes, with few layers. Numbers of experts, how many a token goes to, and one expert's matrices.
def attention_matrices(hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    return 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim


def test_mixtral_8x7b() -> None:
    flops = counted({"model_type": "mixtral", "num_hidden_layers": 2})
    block = (
        attention_matrices(4096, 32, 8, 128) + 4096 * 8 + 2 * (3 * 4096 * 14336)
    )  # attention, router, 2 of 8 experts
    assert flops == FlopCount(6 * (2 * block + 32000 * 4096), (BlockAttention(4096, None),) * 2)


def test_qwen3_30b_a3b() -> None:
    shape = {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [1],
    }  # fmt: skip
    flops = counted(shape)
    sparse, dense = 2048 * 128 + 8 * (3 * 2048 * 768), 3 * 2048 * 6144  # router and 8 of 128 experts; a plain MLP
    matrices = 2 * attention_matrices(2048, 32, 4, 128) + sparse + dense
    assert flops.of_token == 6 * (matrices + 151936 * 2048)


def test_deepseek_v3() -> None:
    flops = counted({"model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 1})
    queries = 7168 * 1536 + 1536 * 128 * 192  # 128 heads of 128 + 64
    keys_values = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    attention = queries + keys_values + 128 * 128 * 7168
    dense = 3 * 7168 * 18432
    sparse = 7168 * 256 + (8 + 1) * (3 * 7168 * 2048)  # router, 8 of 256 experts and the one that all share
    assert flops.of_token == 6 * (2 * attention + dense + sparse + 129280 * 7168)
    assert flops.attention == (BlockAttention(128 * (192 + 128) / 2, None),) * 2  # scores 192 wide, values 128


def test_gpt_oss_20b() -> None:
    flops = counted({"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 32})
    block = attention_matrices(2880, 64, 8, 64) + 2880 * 32 + 4 * (3 * 2880 * 2880)
    assert flops.of_token == 6 * (2 * block + 201088 * 2880)
    assert flops.attention == (BlockAttention(4096, 128), BlockAttention(4096, None))


def test_experts_with_parameters_of_their_own() -> None:
    names = [f"b.mlp.experts.{i}.{part}.weight" for i in range(4) for part in ("up", "down")]
    parameters = [
        ParameterSpec(name, name, (6, 5)) for name in (*names, "b.mlp.shared_expert.up.weight", "b.gate.weight")
    ]
    convolution = ParameterSpec("b.conv.weight", "conv.weight", (7, 1, 4))
    block = LayerSpec("layers.0", LayerKind.BLOCK, ("b",), (*parameters, convolution))
    structure = ModelStructure((block,), (), "", frozenset(), 9, (8.0,), frozenset())
    source = ModelSource({"model_type": "mixtral", "num_experts_per_tok": 3}, None, 0)
    assert FlopCount.of(structure, source).of_token == 6 * ((3 * 2 + 2) * 30 + 28)
    products = work_of(structure, active_experts=3)[0].products
    assert [(p.num_experts, p.routed_share) for p in products if p.num_experts] == [(4, 0.75)] * 8


def test_a_window_bounds_what_a_token_attends_to() -> None:
    flops = FlopCount(0, (BlockAttention(10, None), BlockAttention(10, 4)))
    assert flops.per_step(100, 5000) == 6 * 10 * (5000 + 2 * 4 * 100)
    assert flops.per_step(100, 500) == 6 * 10 * (500 + 500)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("Qwen3-Next", (0, 0, 0, 32)), ("Bamba", (0, 32, 0)), ("Falcon-H1", (32, 32, 32)), ("Zamba2", (0, 64, 0, 64)),
        ("Bloom", (32, 32, 32)), ("GPT-OSS", (32, 32, 32)),
    ],
)  # fmt: skip
def test_only_layers_that_attend_count_by_the_square(name: str, widths: tuple[int, ...]) -> None:
    assert tuple(block.width for block in counted(FAMILIES[name].config).attention) == widths
