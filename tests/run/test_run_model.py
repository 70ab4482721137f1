"""A run directory goes on with the model it began with, whatever its settings say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.leftovers import Leftovers
from megatrain_ray.model.open_model import open_model
from megatrain_ray.run.run_model import MODEL_NAME, check_model, read_leftovers, record_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}


def structure_of(config: dict[str, Any]) -> ModelStructure:
    return discover(open_model(ModelConfig(config=config)).factory, torch.float32, 1, 8)[0]


def check(folder: Path, **changes: Any) -> None:
    config = CONFIG | changes
    check_model(folder, config, structure_of(config))


def test_the_same_model_may_go_on(tmp_path: Path) -> None:
    check(tmp_path)  # nothing written down yet
    record_model(tmp_path, CONFIG, structure_of(CONFIG), Leftovers())
    check(tmp_path)
    check(tmp_path, transformers_version="5.0", torch_dtype="bfloat16", use_cache=False)
    record_model(tmp_path, CONFIG | {"scale": math.nan}, structure_of(CONFIG), Leftovers())
    check(tmp_path, scale=math.nan)
    record_model(tmp_path, CONFIG, structure_of(CONFIG), Leftovers())
    assert read_leftovers(tmp_path) == Leftovers([], [], left_out=[])
    (tmp_path / MODEL_NAME).write_text("[" * 100_000)
    assert read_leftovers(tmp_path) is None
    # Releases before dequantisation left the settings of quantised weights in the configuration.
    record_model(tmp_path, CONFIG | {"quantization_config": {"quant_method": "fp8"}}, structure_of(CONFIG), Leftovers())
    check(tmp_path)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        # the same sizes of everything, and another function
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "config.num_attention_heads: 4 -> 2 (and 1 more)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
         "config.rope_parameters.rope_theta: 10000.0 -> 5.0"),
        ({"rms_norm_eps": 1e-3}, "config.rms_norm_eps: None -> 0.001"),
        ({"tie_word_embeddings": False}, "config.tie_word_embeddings: True -> False (and 1 more)"),
        ({"num_hidden_layers": 3}, "config.num_hidden_layers: 2 -> 3 (and 9 more)"),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_its_first_difference(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    record_model(tmp_path, CONFIG, structure_of(CONFIG), Leftovers())
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path} holds a run of another model: {difference}; set the model back to")


def test_shapes_are_compared_too(tmp_path: Path) -> None:
    """Another version of transformers may build something else of the same configuration."""
    record_model(tmp_path, CONFIG, structure_of(CONFIG | {"hidden_size": 32}), Leftovers())
    with pytest.raises(
        ConfigError, match=r"layers\.embedding\.model\.embed_tokens\.weight\.shape: \[48, 32\] -> \[48, 16\]"
    ):
        check(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MODEL_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"model\.json cannot be read .*delete it to go on without comparing"):
        check(tmp_path)
