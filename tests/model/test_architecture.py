"""Which models are refused before anything is allocated, and code that comes with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.model.open_model import open_model
from megatrain_ray.model.sight_check import check_packing
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe, load_model
from tests.support.run_engine import Mode, train_engine

TINY: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5"}, "a t5 model cannot be trained: it is an encoder-decoder"),
        ({"model_type": "bert"}, r"a bert model cannot be trained: its tokens see later ones.*is_decoder: true makes"),
        ({"model_type": "vit"}, "Transformers has no causal language model of this type"),
        ({"model_type": "lama"}, "'lama' is none that this version of Transformers has"),
        ({"hidden_size": 8}, "None is none that this version of Transformers has"),
        ({"model_type": "gpt2", "n_layers": 3}, "no n_layers; did you mean n_layer?"),
        ({"model_type": "gemma4_assistant"}, "configuration builds no gemma4_assistant model"),
        ({"model_type": "own", "auto_map": {}}, "needs its folder"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_model(ModelConfig(config=config))


def test_an_encoder_that_is_a_decoder_is_let_in() -> None:
    source = open_model(ModelConfig(config={"model_type": "bert", "is_decoder": True, **TINY}))
    structure, _ = discover(source.factory, torch.float32, 1, 8)
    assert [len(layer.modules) for layer in structure.layers] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("config", "fp32"),
    [
        # By a list of the class, by the type that a module asks for, and by the type in which a parameter is made.
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
             "moe_layer_end_index": 1}, ["mlp.gate.moe_statics.e_score_correction_bias"],
        ),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 2, "head_dim": 8}, ["mlp.gate.wg.weight"]),
        (
            {"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
             "pad_token_id": None, "eos_token_id": None}, ["linear_attn.A_log"],
        ),
        ({"model_type": "llama"}, []),
    ],
)  # fmt: skip
def test_each_parameter_has_the_type_that_transformers_leaves_it_in(
    config: dict[str, Any], fp32: list[str], tmp_path: Path
) -> None:
    factory = Architecture({**TINY, "num_key_value_heads": 1, **config})
    factory(torch.float32).save_pretrained(tmp_path)
    theirs = {name: p.dtype for name, p in load_model(tmp_path, torch.bfloat16).named_parameters()}
    assert {name: p.dtype for name, p in factory(torch.bfloat16).named_parameters()} == theirs
    structure, _ = discover(factory, torch.bfloat16, 1, 8)
    kept = {p.name for layer in structure.layers for p in layer.parameters if p.fp32}
    assert kept == {name for name, dtype in theirs.items() if dtype is torch.float32}
    assert all(any(name.endswith(end) for name in kept) for end in fp32)
    assert bool(kept) == bool(fp32)


def test_a_parameter_of_a_third_type_is_refused() -> None:
    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return Architecture({"model_type": "llama", **TINY})(torch.float16)

    with pytest.raises(ConfigError, match=r"keeps model\.embed_tokens\.weight in float16 .* only float32 beside bf"):
        discover(factory, torch.bfloat16, 1, 8)


def with_own_code(folder: Path) -> Path:
    build_family("Llama", folder)
    (folder / "modeling_own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_models_own_code_runs_only_where_the_configuration_says_so(tmp_path: Path) -> None:
    own, llama = with_own_code(tmp_path / "own"), build_family("Llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"code of its own.*model\.trust_remote_code: true"):
        open_model(ModelConfig(path=str(own)))
    batches, recipe = family_batches(2), Recipe(2, micro_batch_size=2)
    ours = train_engine(own, batches, recipe, Mode(), trust_remote_code=True)
    assert ours.losses == train_engine(llama, batches, recipe, Mode()).losses
    check_packing(open_model(ModelConfig(path=str(own), trust_remote_code=True)).architecture)


def test_no_parameter_is_allocated_where_a_model_is_only_described() -> None:
    """Of this one each part would take 4 TiB, more than machines let a process ask for."""
    sizes = {
        "vocab_size": 1 << 20,
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 20,
        "num_attention_heads": 1 << 10,
    }
    model = build_empty(Architecture({"model_type": "llama", "num_hidden_layers": 1, **sizes}), torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


def test_no_value_is_drawn_for_a_model_that_is_only_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would trace each draw for a tensor without memory in Python, for longer than all else takes."""
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *_, **__: pytest.fail(f"drawn: {tuple(tensor.shape)}"))
    for shape in ({"model_type": "llama"}, {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1}):
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 64}
        build_empty(Architecture(shape | sizes), torch.float32)


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_what_a_model_computes_and_nobody_stores_is_that_of_from_pretrained(tmp_path: Path, model_type: str) -> None:
    """It is so in bf16 too, where both compute angles of 2048 positions in the type that is the default meanwhile."""
    sizes = {"vocab_size": 50, "n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 32, "n_positions": 2048}
    model = Architecture({"model_type": model_type, **sizes})(torch.float32)
    model.save_pretrained(tmp_path)
    source = open_model(ModelConfig(path=str(tmp_path)))
    ours = dict(build_empty(source.factory, torch.bfloat16).named_buffers())
    theirs = dict(load_model(tmp_path, torch.bfloat16).named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name
