"""What is frozen in models that are not the plainest: side outputs, shared weights, containers, dropout, their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.engine.step.test_families import LAYERS
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp.requires_grad_(False)
"""
CASES = [
    pytest.param("Mixtral", Recipe(3, trainable=("lm_head",)), id="router loss of frozen layers alone"),
    pytest.param("Qwen3-MoE", Recipe(3, freeze=(r"layers\.0\.", "embed", r"mlp\.gate", "experts")), id="experts"),
    pytest.param("GPT-2", Recipe(3, freeze=(r"h\.0\.", "wpe", "wte"), seed=3), id="below dropout, tied"),
    pytest.param("Zamba2", Recipe(3, freeze=("shared_transformer|mamba.in_proj",)), id="weights shared by layers"),
    pytest.param("DeepSeek-V3", Recipe(3, freeze=("embed", r"layers\.[01]\.mlp")), id="mixed kinds of layers"),
]


@pytest.mark.parametrize(("name", "recipe"), CASES)
@pytest.mark.parametrize("mode", [Mode(), LAYERS], ids=["outer", "layers"])
def test_families_are_bit_equal(tmp_path: Path, name: str, recipe: Recipe, mode: Mode) -> None:
    build_family(name, tmp_path)
    batches = family_batches(recipe.steps)
    ours, theirs = train_engine(tmp_path, batches, recipe, mode), train_reference(tmp_path, batches, recipe)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    assert ours.frozen
    assert ours.masters.keys() == theirs.masters.keys()
    assert [name for name, m in theirs.masters.items() if not torch.equal(ours.masters[name], m)] == []
    assert [name for name, m in theirs.exp_avg.items() if not torch.equal(ours.exp_avg[name], m)] == []


def test_what_a_model_itself_freezes_stays_frozen(tmp_path: Path) -> None:
    own, llama = build_family("Llama", tmp_path / "own"), build_family("Llama", tmp_path / "llama")
    (own / "modeling_own.py").write_text(CODE)
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.OwnConfig"}}
    config["auto_map"]["AutoModelForCausalLM"] = "modeling_own.OwnModel"
    (own / "config.json").write_text(json.dumps(config))
    batches = family_batches(2)
    ours = train_engine(own, batches, Recipe(2, trainable=(".",)), Mode(), trust_remote_code=True)
    theirs = train_reference(llama, batches, Recipe(2, freeze=(r"layers\.1\.mlp",)))
    assert len(ours.frozen) == 3
    assert ours.losses == theirs.losses
    assert all(torch.equal(ours.masters[name], master) for name, master in theirs.masters.items())
