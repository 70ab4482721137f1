"""From a configuration to a plan: lengths that the model has no positions for, how layers attend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config import TrainConfig
from megatrain_ray.engine.plan_request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.planning import Prepared, prepare
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


def test_no_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    assert prepared(tmp_path, {}, data__seq_len=POSITIONS).plan.seq_len == POSITIONS
    with pytest.raises(ConfigError, match=r"data\.seq_len: 41 is more than the model's 40 positions"):
        prepared(tmp_path, {}, data__seq_len=POSITIONS + 1)
