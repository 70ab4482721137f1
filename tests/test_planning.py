"""From a configuration to a plan: FLOPs counted by hand, lengths that the model has no positions for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config import TrainConfig
from megatrain_ray.engine.plan_request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.planning import FlopCount, Prepared, prepare
from tests.runs import config

MACHINE = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB, POSITIONS = 48, 112, 3, 4, 2, 264, 40
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
}


def prepared(folder: Path, shape: dict[str, Any], **changes: Any) -> Prepared:
    tree = config(folder, LLAMA | shape, **changes)
    return prepare(TrainConfig.model_validate(tree).resolve(), MACHINE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_dim", [HIDDEN // HEADS, 16])
def test_flops_by_hand(tmp_path: Path, tied: bool, head_dim: int) -> None:
    """A tied head multiplies as an untied one does; the embedding multiplies never, nor do norms."""
    ready = prepared(tmp_path, {"tie_word_embeddings": tied, "head_dim": head_dim})
    flops = FlopCount.of(ready.structure, ready.source)
    d_attn, d_kv = HEADS * head_dim, KV_HEADS * head_dim
    block = 2 * HIDDEN * d_attn + 2 * HIDDEN * d_kv + 3 * HIDDEN * INNER  # q and o, k and v, MLP
    num_matmul = LAYERS * block + VOCAB * HIDDEN
    assert flops == FlopCount(6 * num_matmul, 6 * LAYERS * d_attn)
    lengths = (32, 32, 20)
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    assert flops.per_step(tokens, squares) == 6 * num_matmul * tokens + 6 * LAYERS * d_attn * squares


def test_a_head_dim_that_is_not_given_is_hidden_over_heads(tmp_path: Path) -> None:
    ready = prepared(tmp_path, {})
    assert FlopCount.of(ready.structure, ready.source).of_pair == 6 * LAYERS * HIDDEN


def test_flops_of_what_is_frozen_are_not_counted(tmp_path: Path) -> None:
    """A forward of everything, what goes on to the inputs down to the lowest trained layer, gradients of the rest."""
    ready = prepared(tmp_path, {}, train__freeze=["embed", r"layers\.0\.", "mlp"])
    attention, mlp = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2, 3 * HIDDEN * INNER
    of_token = 2 * (attention + mlp) + 2 * (6 * attention + 4 * mlp) + 6 * VOCAB * HIDDEN
    assert FlopCount.of(ready.structure, ready.source) == FlopCount(of_token, (2 + 2 * 6) * HIDDEN)


def test_no_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    assert prepared(tmp_path, {}, data__seq_len=POSITIONS).plan.seq_len == POSITIONS
    with pytest.raises(ConfigError, match=r"data\.seq_len: 41 is more than the model's 40 positions"):
        prepared(tmp_path, {}, data__seq_len=POSITIONS + 1)
