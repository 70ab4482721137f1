"""What is trained of a folder is what Transformers makes of it, however the folder is laid out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.data.python_objects import save_model
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.weights.saved_values import bytes_of
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.source_extras import export_extras
from megatrain_ray.io.checkpoints.quantisation import SETTINGS_KEY
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, WeightFolder
from megatrain_ray.model.architecture import Architecture, owned_parameters
from megatrain_ray.model.open_model import open_model, read_model
from tests.support.families import FAMILIES, SIZES
from tests.support.quantised import as_fp8, as_mxfp4
from tests.support.reference import load_model

WEIGHTS = "model.safetensors"
EXPERTS: dict[str, Any] = {
    **SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Models whose checkpoints hold a buffer, the bias of a router, under another name than the model.
WITH_RENAMED_BUFFERS: dict[str, dict[str, Any]] = {
    "minimax_m2": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 8},
    "exaone_moe": {**EXPERTS, "num_experts": 4, "first_k_dense_replace": 1, "head_dim": 8},
    "nemotron_h": {
        **EXPERTS, "n_routed_experts": 4, "layers_block_type": ["mamba", "moe", "attention"], "head_dim": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a model whose parameters and buffers are all random. Return what the file holds."""
    torch.manual_seed(0)
    model = Architecture(config)(torch.float32)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.normal_(tensor.data, std=0.1)
    model.save_pretrained(folder)
    return load_file(folder / WEIGHTS)


def assert_trained_as_loaded(folder: Path) -> None:
    """Every parameter and persistent buffer has the bits that from_pretrained gives it."""
    theirs, source = load_model(folder, torch.float32), open_model(ModelConfig(path=str(folder)))
    ours, weights = build_empty(source.factory, torch.float32), source.weights()
    assert set(owned_parameters(ours)) == set(owned_parameters(theirs))
    for name in owned_parameters(theirs):
        expected = theirs.get_parameter(name).detach()
        assert torch.equal(weights.read(name, 0, expected.numel()), expected.flatten()), name
    buffers = dict(ours.named_buffers())
    for name, expected in theirs.named_buffers():
        assert torch.equal(buffers[name], expected), name


@pytest.mark.parametrize("model_type", WITH_RENAMED_BUFFERS)
def test_buffers_that_a_checkpoint_names_otherwise(tmp_path: Path, model_type: str) -> None:
    held = write(tmp_path, {"model_type": model_type, **WITH_RENAMED_BUFFERS[model_type]})
    model = load_model(tmp_path, torch.float32)
    renamed = {name for name, _ in model.named_buffers() if "bias" in name} - held.keys()
    assert renamed, "this type's checkpoints have the model's own names"
    assert_trained_as_loaded(tmp_path)
    untrained = SimpleNamespace(layers=(), model=json.loads((tmp_path / "config.json").read_text()))
    beside = export_extras(ModelConfig(path=str(tmp_path)), untrained)  # type: ignore[arg-type]
    exported = {tensor.name: b"".join(map(bytes, tensor.chunks())) for tensor in beside.rest}
    assert exported == {name: bytes_of(tensor.contiguous().view(-1)) for name, tensor in held.items()}


def without_prefix(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """As GPT-2 is on the hub: the names are those of the base model."""
    save_file({name.partition(".")[2]: w for name, w in held.items() if name != "lm_head.weight"}, folder / WEIGHTS)


def beside_an_older_index(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """As Transformers leaves a folder of several files that a smaller model was saved to."""
    save_file({name: w + 1 for name, w in held.items()}, folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors")}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def as_gemma3_on_the_hub(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """Its settings have names that Transformers reads no more, and one that is close to another name."""
    settings = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "rope_parameters", "_sliding_window_pattern"):
        settings.pop(name, None)
    settings |= {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    (folder / "config.json").write_text(json.dumps(settings))


def with_a_head_of_its_own(folder: Path, held: dict[str, torch.Tensor]) -> None:
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1}, folder / WEIGHTS)


def with_the_tied_head_twice(folder: Path, held: dict[str, torch.Tensor]) -> None:
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, folder / WEIGHTS)


def in_two_files(folder: Path, held: dict[str, torch.Tensor]) -> None:
    beside_an_older_index(folder, held)
    (folder / "model-00001-of-00001.safetensors").unlink()
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")


def beside_other_formats(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """As Mistral's and Meta's folders on the hub; and generation settings that are no JSON, which are passed over."""
    others = {name: weight + 1 for name, weight in held.items()}
    for name in ("consolidated.safetensors", "model.fp16.safetensors"):
        save_file(others, folder / name)
    torch.save(others, folder / "pytorch_model.bin")
    (folder / "original").mkdir()
    for name in ("params.json", "original/params.json", "original/consolidated.00.pth", "tiny.gguf"):
        (folder / name).write_text("{}")
    (folder / "generation_config.json").write_text("{")


def pickled(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """As older folders are, with tensors that share a storage, beside the index of a larger model."""
    torch.save(held | {"lm_head.weight": held["model.embed_tokens.weight"]}, folder / "pytorch_model.bin")
    index = {"weight_map": dict.fromkeys(held, "pytorch_model-00001-of-00001.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


def pickled_in_two_files(folder: Path, held: dict[str, torch.Tensor]) -> None:
    names = list(held)
    files = {name: f"pytorch_model-0000{1 + (name in names[5:])}-of-00002.bin" for name in names}
    for file in set(files.values()):
        torch.save({name: held[name].bfloat16() for name in names if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Llama, tied", pickled),
        ("Llama", pickled_in_two_files),
        ("Llama", beside_other_formats),
        ("GPT-2", without_prefix),
        ("Llama, tied", without_prefix),
        ("Llama", beside_an_older_index),
        ("Llama", in_two_files),
        ("Llama, tied", with_a_head_of_its_own),
        ("Llama, tied", with_the_tied_head_twice),
        ("Gemma 3", as_gemma3_on_the_hub),
    ],
)
def test_a_folder_is_read_as_transformers_reads_it(
    tmp_path: Path, family: str, change: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    change(tmp_path, write(tmp_path, FAMILIES[family].config))
    assert_trained_as_loaded(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("adapter_config.json adapter_model.safetensors", "adapter: name its base as model.path, and this"),
        (
            "config.json adapter_config.json model.safetensors",
            "so Transformers loads the adapter's base",
        ),
        ("config.json tiny-Q4_K_M.gguf", "GGUF, which is not read"),
        ("tiny.gguf", "cannot read .*config.json: .*GGUF"),
        ("config.json model-00001-of-00002.safetensors", "index of its files is missing"),
        ("config.json model.fp16.safetensors", "variant"),
        ("config.json model.safetensors.index.fp16.json model.fp16-00001-of-00002.safetensors", "variant"),
        ("config.json params.json consolidated.safetensors", "the maker's own format"),
        ("sub/config.json sub/model.safetensors", "a folder within it has one"),
        ("config.json unet/model.safetensors", "a folder within it holds weights"),
        ("config.json pytorch_model-00001-of-00002.bin", "fetch pytorch_model.bin.index.json"),
        ("config.json training_args.bin", "of pickled weights, those under the names of Transformers are read"),
        ("config.json README.md", "is it a model?"),
    ],
)
def test_a_folder_of_something_else_says_what_to_do(tmp_path: Path, names: str, expected: str) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(FAMILIES["Llama"].config))
    with pytest.raises(ConfigError, match=expected):
        read_model(ModelConfig(path=str(tmp_path)))
        WeightFolder.open(tmp_path)


@pytest.mark.parametrize(("family", "quantise"), [("GPT-OSS", as_mxfp4), ("DeepSeek-V3", as_fp8)])
def test_quantised_weights_begin_as_transformers_dequantises_them(
    tmp_path: Path, family: str, quantise: Callable[[Path], None]
) -> None:
    """By path, and as an object that Transformers has dequantised, which it would save quantised again."""
    write(tmp_path, FAMILIES[family].config | {"intermediate_size": 64})
    quantise(tmp_path)
    assert_trained_as_loaded(tmp_path)
    assert SETTINGS_KEY not in open_model(ModelConfig(path=str(tmp_path))).config
    model, source = load_model(tmp_path, torch.float32), tmp_path / "object"
    save_model(model, source)
    assert_trained_as_loaded(source)
    weights = open_model(ModelConfig(path=str(source))).weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name, 0, parameter.numel()), parameter.detach().flatten()), name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq\).* by its name perhaps .*/Tiny-7B\. "),
        ({"quant_method": "awq"}, r"quantised \(awq\)"),
        ({"load_in_4bit": True}, r"quantised \(bitsandbytes\)"),
        ({"bits": 3}, r"quantised \(an unknown method\)"),
    ],
)
def test_other_quantised_folders_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    folder = tmp_path / "Tiny-7B-GPTQ-Int4"
    folder.mkdir()
    config = {**FAMILIES["Llama"].config, SETTINGS_KEY: settings}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"model.path: {folder}: its weights are {expected}"):
        read_model(ModelConfig(path=str(folder)))
    read_model(ModelConfig(config=str(folder / "config.json")))  # its weights are random
