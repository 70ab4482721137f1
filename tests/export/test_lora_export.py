"""Exports of adapters and of merged models, for families that are not the plainest, against the peft library."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.lora import is_adapter
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.weights import saved_values
from megatrain_ray.engine.weights.frozen_checksums import frozen_checksums
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export_lora import export_adapter, export_merged
from megatrain_ray.export.source_extras import export_extras
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import save_folder
from tests.engine.weights.test_round_trip import save
from tests.support.adapters import build_adapter, peft
from tests.support.family_models import build_family, family_batches
from tests.support.host_state import HostState
from tests.support.recipes import lora_of
from tests.support.reference import Recipe, load_model
from tests.support.run_engine import Mode, folder_source, plan_for

CASES = {
    "GPT-2": (("c_attn", "h.1.mlp.c_fc"), ("ln_f",)),
    "Mixtral": (("q_proj", "v_proj"), (r"\.gate\.",)),
    "Llama, tied": (("down_proj", "layers.2.self_attn.o_proj"), ("embed_tokens",)),
    "Gemma 3, vision-language": (("language_model.layers.1.self_attn.q_proj", "down_proj"), ()),
}


def saved(folder: Path, model: Path, recipe: Recipe) -> Manifest:
    """Make a save without its base, of a run's first values; trained weights beside the pairs are times 1.5."""
    source = folder_source(model).with_lora(lora_of(recipe))
    structure, plan = plan_for(source.factory, recipe, Mode(num_shards=2), (1, 8))
    source.check_weights(structure)
    source.check_adapter(structure)
    state = HostState(structure.layout(), plan, recipe, saves_frozen=False)
    state.load(source.weights())
    for name, values in state.named(state.working).items():
        if not is_adapter(name):
            values *= 1.5
    checksums = frozen_checksums(state.layout, state.working_of, 1)
    manifest = save(state, folder, Precision(recipe.precision), checksums)  # type: ignore[arg-type]  # all it looks at
    return dataclasses.replace(manifest, model=json.loads((model / "config.json").read_text()))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=family_batches(1)[0].input_ids).logits
    return found


@pytest.mark.spread(4)  # each family once
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("family", CASES)
def test_both_exports_compute_what_peft_does(
    tmp_path: Path, family: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters come out as they went in, what is trained beside them counts, and all of it can be merged in parts."""
    if small:
        monkeypatch.setattr(saved_values, "READ_ELEMENTS", 100)
    targets, beside = CASES[family]
    model = build_family(family, tmp_path / "model")
    recipe = Recipe(1, adapter=build_adapter(tmp_path / "adapter", model, targets), trainable=beside)
    manifest = saved(tmp_path, model, recipe)
    lora, base = lora_of(recipe), folder_source(model)
    assert lora is not None
    empty, config = build_empty(base.factory, torch.float32), ModelConfig(path=str(model))
    folder = save_folder(tmp_path, 0)
    export_adapter(folder, manifest, tmp_path / "out", None, lora, empty, config, ())
    theirs, ours = (
        safetensors.torch.load_file(tmp_path / at / "adapter_model.safetensors") for at in ("adapter", "out")
    )
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(ours[name], values) for name, values in theirs.items())
    whole = export_extras(config, manifest)
    export_merged(
        folder, manifest, tmp_path / "merged", None, lora, empty, base.weights(),
        names=whole.names, rest=whole.rest, copies=(),
    )  # fmt: skip
    alone = logits(peft.PeftModel.from_pretrained(load_model(model, torch.float32), tmp_path / "out"))
    before = logits(peft.PeftModel.from_pretrained(load_model(model, torch.float32), tmp_path / "adapter"))
    assert torch.equal(alone, before) is (not beside)
    merged = load_model(tmp_path / "merged", torch.float32)
    torch.testing.assert_close(logits(merged), alone, rtol=1e-5, atol=1e-5)
    assert (logits(merged) - logits(load_model(model, torch.float32))).abs().max() > 0.01


def test_nothing_is_merged_into_another_base(tmp_path: Path) -> None:
    model = build_family("Llama", tmp_path / "model")
    recipe = Recipe(1, precision="bf16", adapter=build_adapter(tmp_path / "adapter", model, ["q_proj"]))
    manifest, lora, base = saved(tmp_path, model, recipe), lora_of(recipe), folder_source(model)
    assert lora is not None
    empty, beside = build_empty(base.factory, torch.float32), export_extras(ModelConfig(path=str(model)), manifest)
    arguments: dict[str, Any] = {"names": beside.names, "rest": beside.rest, "copies": ()}
    folder = save_folder(tmp_path, 0)
    export_merged(folder, manifest, tmp_path / "1", None, lora, empty, base.weights(), **arguments)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] *= 1.1
    safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"base model has changed: the frozen weights of layers\.2 \(and 0 more"):
        export_merged(folder, manifest, tmp_path / "2", None, lora, empty, base.weights(), **arguments)
    assert not (tmp_path / "2").exists()


def test_targets_are_named_as_shortly_as_they_can_be(tmp_path: Path) -> None:
    """Last names are used where these mean the same modules, else paths."""
    model = build_family("Llama", tmp_path / "model")
    for targets, expected in {
        ("q_proj", "lm_head"): ["lm_head", "q_proj"],
        ("layers.1.self_attn.q_proj",): ["model.layers.1.self_attn.q_proj"],
    }.items():
        at = tmp_path / expected[0]
        recipe = Recipe(1, adapter=build_adapter(at / "adapter", model, targets))
        manifest, lora = saved(at, model, recipe), lora_of(recipe)
        assert lora is not None
        empty = build_empty(folder_source(model).factory, torch.float32)
        export_adapter(save_folder(at, 0), manifest, at / "out", None, lora, empty, ModelConfig(path="o/m@v1"), ())
        settings = json.loads((at / "out" / "adapter_config.json").read_text())
        assert settings["target_modules"] == expected
        assert (settings["base_model_name_or_path"], settings["revision"]) == ("o/m", "v1")
