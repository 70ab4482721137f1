"""Import and export of models whose checkpoints name and cut weights in another way than the model does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.weights.export_save import export_save
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.source_extras import export_extras
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, MappedWeights, is_covered
from megatrain_ray.io.saves.save_folder import save_folder
from megatrain_ray.model.architecture import Architecture
from tests.engine.weights.test_round_trip import assert_same_bytes, exported, save
from tests.support.families import FAMILIES
from tests.support.family_models import build_family
from tests.support.host_state import HostState
from tests.support.model_types import all_types, settings_of
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.type_sweep import build

VISION_LANGUAGE = [name for name, of_family in FAMILIES.items() if of_family.frozen]


# Types that are published with matrices joined (queries, keys and values), interleaved (gates of experts), or padded.
JOINED = ["sarvam_moe", "inkling2_text", "step3p7", "lara_mini", "ernie4_5_vl_moe"]


@pytest.mark.parametrize(
    "name",
    [
        *("GPT-2", "GPT-NeoX", "Mixtral", "DeepSeek-V3", "GPT-OSS", "Jamba", "Zamba2", *VISION_LANGUAGE),
        *(t for t in JOINED[:2] if t in all_types()),
        *(pytest.param(t, marks=pytest.mark.long) for t in JOINED[2:] if t in all_types()),
    ],
)
def test_the_same_bytes_come_out(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in"
    if name in FAMILIES:
        build_family(name, folder)
    else:
        build(settings_of(name), folder)
    weights = exported(folder)
    images = {n: w.bfloat16() for n, w in weights.items() if "vis" in n}  # which are to keep their type
    safetensors.torch.save_file(weights | images, folder / "model.safetensors", {"format": "pt"})
    source = folder_source(folder)
    recipe = Recipe(1)
    structure, plan = plan_for(source.factory, recipe, Mode(num_shards=2), (1, 8))
    source.check_weights(structure)
    state = HostState(structure.layout(), plan, recipe)
    state.load(source.weights())
    manifest = save(state, tmp_path, Precision.FP32)  # type: ignore[arg-type]  # layout and shards are all it looks at
    manifest = dataclasses.replace(manifest, model=json.loads((folder / "config.json").read_text()))
    beside = export_extras(ModelConfig(path=str(folder)), manifest)
    export_save(save_folder(tmp_path, 0), manifest, tmp_path / "out", names=beside.names, rest=beside.rest)
    assert_same_bytes(exported(tmp_path / "out"), exported(folder))
    of_model = Architecture(dict(manifest.model))(torch.float32).state_dict().keys()
    assert bool(beside.names) == bool(weights.keys() - of_model)  # most differ in Transformers 5, few in 4
    if name in FAMILIES:
        assert bool(beside.rest) == bool(FAMILIES[name].frozen or name == "DeepSeek-V3")


def test_a_transposed_piece_is_read_in_any_range(tmp_path: Path) -> None:
    """A parameter [2, 3, 4] that a checkpoint holds as two tensors, the second one transposed."""
    whole = torch.arange(24.0).view(2, 3, 4)
    safetensors.torch.save_file({"a": whole[0].clone(), "b": whole[1].t().contiguous()}, tmp_path / "model.safetensors")
    pieces = [CheckpointTensor("a", (3, 4), 0, (4, 1)), CheckpointTensor("b", (4, 3), 12, (1, 4))]
    assert is_covered(24, pieces)
    weights = MappedWeights(WeightFolder.open(tmp_path), {"p": pieces})
    weights.check({"p": (2, 3, 4)})
    for start in range(25):
        for stop in range(start, 25):
            assert torch.equal(weights.read("p", start, stop), whole.flatten()[start:stop])


@pytest.mark.parametrize(
    ("pieces", "covers"),
    [
        pytest.param(
            [CheckpointTensor("a", (12,), 0, (2,)), CheckpointTensor("b", (12,), 1, (2,))], True, id="interleaved"
        ),
        pytest.param([CheckpointTensor("a", (12,), 0, (1,))], False, id="half"),
        pytest.param(
            [CheckpointTensor("a", (16,), 0, (1,)), CheckpointTensor("b", (12,), 12, (1,))], False, id="overlap"
        ),
    ],
)
def test_pieces_that_do_not_make_the_parameter_cannot_be_read(pieces: list[CheckpointTensor], covers: bool) -> None:
    assert is_covered(24, pieces) is covers


def test_weights_that_are_published_joined_are_refused_unless_they_have_the_models_names(tmp_path: Path) -> None:
    safetensors.torch.save_file({"qkv": torch.zeros(6)}, tmp_path / "model.safetensors")
    weights = MappedWeights(WeightFolder.open(tmp_path), {"q": ()})
    with pytest.raises(ConfigError, match=r"holds no q; models of this type .* save_original_format=False"):
        weights.check({"q": (2,)})
    safetensors.torch.save_file({"q": torch.zeros(2)}, tmp_path / "model.safetensors")
    MappedWeights(WeightFolder.open(tmp_path), {"q": ()}).check({"q": (2,)})


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = build_family("Mixtral", tmp_path)
    stored = exported(folder)
    gone = next(name for name in stored if ".experts.3." in name)
    safetensors.torch.save_file({k: v for k, v in stored.items() if k != gone}, folder / "model.safetensors")
    source = folder_source(folder)
    structure, _ = plan_for(source.factory, Recipe(1), Mode(), (1, 8))
    with pytest.raises(ConfigError, match=f"but no {gone}"):
        source.check_weights(structure)
