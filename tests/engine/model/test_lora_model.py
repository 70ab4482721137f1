"""Where pairs stand, what they begin as, and what is refused; none of it needs the peft library."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from megatrain_ray.cli import main
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layer_calls.template import structure
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.lora import LoraRules
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.weights.frozen_checksums import frozen_checksums
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.peft_adapter import AdapterFolder
from megatrain_ray.model.open_model import open_model
from megatrain_ray.planning.run_spec import planning_problem
from tests.support.fake_hub import files_of, fill_cache
from tests.support.families import FAMILIES
from tests.support.family_models import build_family
from tests.support.host_state import HostState
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for, train_engine
from tests.support.runs import ROOT, config, write_config
from tests.support.tiny import build_tiny, tiny_batches

LORA = LoraConfig(match=(r"self_attn\.", r"mlp\."), rank=4, alpha=8)


def test_the_example_is_a_configuration() -> None:
    lora = load_config(ROOT / "examples" / "lora.yaml").lora
    assert lora is not None
    assert (lora.match, lora.rank, lora.alpha) == ((r"self_attn\.", r"mlp\."), 16, 32)


def test_a_new_adapter_changes_nothing_at_first(tmp_path: Path) -> None:
    """The first loss is the model's own, bit for bit; the second is not."""
    folder, batches = build_tiny(tmp_path), tiny_batches(2)
    for precision in ("fp32", "bf16"):
        recipe = Recipe(2, precision=precision)
        whole, pairs = (train_engine(folder, batches, recipe, Mode(), lora=lora) for lora in (None, LORA))
        assert pairs.losses[0] == whole.losses[0]
        assert pairs.losses[1] not in (whole.losses[1], pairs.losses[0])
        moved = [name for name, master in pairs.masters.items() if name.endswith("lora_B.weight") and master.any()]
        assert len(moved) == 3 * 7


def test_what_a_new_adapter_begins_with(tmp_path: Path) -> None:
    """A as nn.Linear draws it, by seed and name alone; B is zero; parts of both as the whole."""
    source = folder_source(build_tiny(tmp_path)).with_lora(LORA)
    weights, name = source.weights(), "model.layers.1.mlp.down_proj.lora_A.weight"
    a = weights.read(name, 0, 4 * 176)
    assert a.abs().max() <= 1 / math.sqrt(176)
    assert a.std() == pytest.approx(1 / math.sqrt(3 * 176), rel=0.1)
    assert torch.equal(weights.read(name, 100, 300), a[100:300])
    assert torch.equal(source.weights().read(name, 0, 4 * 176), a)
    assert not torch.equal(weights.read(name.replace("layers.1", "layers.2"), 0, 4 * 176), a)
    assert not weights.read(name.replace("lora_A", "lora_B"), 0, 64 * 4).any()
    assert torch.equal(
        weights.read("model.norm.weight", 0, 64), folder_source(tmp_path).weights().read("model.norm.weight", 0, 64)
    )


def test_names_and_shapes(tmp_path: Path) -> None:
    """The base keeps its names; a Conv1D's sides are the other way round."""
    own = folder_source(build_family("GPT-2", tmp_path))
    lora = LoraConfig(match=(r"mlp\.c_fc$",), rank=2)
    model, before = (build_empty(s.factory, torch.float32) for s in (own.with_lora(lora), own))
    added = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in before.state_dict()}
    assert added == {
        f"transformer.h.{i}.mlp.c_fc.lora_{which}.weight": shape
        for i in range(3)
        for which, shape in (("A", (2, 32)), ("B", (128, 2)))
    }
    assert [n for n, _ in model.named_parameters() if "lora" not in n] == [n for n, _ in before.named_parameters()]


def tree(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    lora = {"match": list(LORA.match), "rank": 4, "alpha": 8}
    return config(tmp_path / "run", build_tiny(tmp_path / "model"), train__precision="bf16", lora=lora, **changes)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "lora.match=[q_porj]",
            "lora.match: 'q_porj' matches no linear module of the model (22 of them); near it are ",
        ),
        ("lora.match=[norm]", "lora.match: 'norm' matches no linear module of the model"),
        ("lora.match=[q_proj, embed]", "lora.match: model.embed_tokens is of class Embedding"),
        (
            "lora.match=['.']",
            "lora.match: model.embed_tokens is of class Embedding: a pair stands beside the matrix of a linear module",
        ),
        ("lora.match=['(']", "lora.match: '(' is no regular expression"),
        ("lora.match=[]", "lora.match: expected"),
        ("lora={rank: 4}", "lora.match: required. Patterns (regular expressions) over the paths of linear modules"),
        ("lora.rank=33", "self_attn.k_proj is 32 × 64, and lora.rank is 33: set at most the smaller side; make"),
        ("lora.rank=0", "lora.rank: expected greater than or equal to 1"),
        ("lora.alpha=0", "lora.alpha: expected greater than 0"),
        ("lora.ranks=4", "lora.ranks: unknown key; did you mean lora.rank?"),
        (
            "train.freeze=['layers.0']",
            "train.freeze matches model.layers.0.self_attn.q_proj.lora_A.weight: an adapter that",
        ),
        (
            "train.trainable=[q_proj]",
            "train.trainable matches model.layers.0.self_attn.q_proj.weight, whose module has",
        ),
        ("train.trainable=[q_porj]", "train.trainable: 'q_porj' matches no parameter"),
    ],
)
def test_settings_that_cannot_be_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    assert main(["plan", str(write_config(tmp_path / "config.yaml", tree(tmp_path))), override]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "match", "says"),
    [
        ("Llama, tied", "lm_head", "lora.match: lm_head shares its matrix with another module"),
        ("GPT-OSS", r"mlp\.", "a pair stands beside the matrix of a linear module only; make the pattern narrower"),
        ("Zamba2", r"feed_forward\.", "shares its matrix with another module"),
    ],
)
def test_matrices_that_can_have_no_pair(family: str, match: str, says: str) -> None:
    source = open_model(ModelConfig(config=FAMILIES[family].config)).with_lora(LoraConfig(match=(match,), rank=2))
    with pytest.raises(ConfigError, match=says):
        discover(source.factory, torch.float32, 1, 8, LoraRules())


def test_a_pair_that_would_never_compute(tmp_path: Path) -> None:
    """A pair would never compute in Jamba, which multiplies by the matrix of its dt_proj itself."""
    source = folder_source(build_tiny(tmp_path)).with_lora(LORA)

    def factory(dtype: torch.dtype) -> nn.Module:
        model = source.factory(dtype)
        module = model.get_submodule("model.layers.1.mlp.up_proj")
        module.forward = lambda x: x @ module.weight.T  # type: ignore[method-assign, operator, union-attr]
        return model

    with pytest.raises(ConfigError, match=r"lora.match: the matrix of model\.layers\.1\.mlp\.up_proj is read without"):
        discover(factory, torch.float32, 1, 8, LoraRules())


def test_the_plan_counts_two_bytes_a_frozen_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tree(tmp_path, train__micro_batch_size=4, save_every=1)
    plan = planning_problem(TrainConfig.model_validate(settings)).plan()
    rows = {row.name: row.num_bytes for row in plan.memory_items if row.tier is Tier.HOST}
    pairs = 3 * 4 * sum((64 + 64, 64 + 32, 64 + 32, 64 + 64, 64 + 176, 64 + 176, 176 + 64))
    base = 2 * 257 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64)
    assert (plan.num_trained, plan.num_parameters) == (pairs, base + pairs)
    assert plan.save_bytes == plan.updated_bytes == 12 * pairs
    assert plan.frozen_bytes == 2 * base
    assert rows["optimizer state"] < 10 * (pairs + 3 * 2048)
    assert rows["gradients in waiting"] < 2 * (pairs + 3 * 2048)
    assert rows["working copy"] < 2 * (base + pairs + 5 * 2 * 2048)
    assert main(["plan", str(write_config(tmp_path / "config.yaml", settings))]) == 0
    shown = capsys.readouterr().out
    assert "frozen wholly: embedding, head; partly: layers.0, layers.1, layers.2" in shown
    assert f"{2 * base / 1024:.2f} KiB that is frozen is left out" in shown


def write_adapter(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Write an adapter for q_proj of the tiny model's layers, of rank 2, after `change`."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
    tensors = {}
    for i in range(3):
        path = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors |= {f"{path}.lora_A.weight": torch.ones(2, 64), f"{path}.lora_B.weight": torch.ones(64, 2)}
    change(settings, tensors)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, t: c.update(peft_type="IA3"), "only plain LoRA without biases is trained, got IA3"),
        (lambda c, t: c.update(use_dora=True), "got use_dora"),
        (lambda c, t: c.update(use_rslora=True), "got use_rslora"),
        (lambda c, t: c.update(bias="all"), "got bias: all"),
        (lambda c, t: c.update(rank_pattern={"x": 3}), "got rank_pattern"),
        (
            lambda c, t: c.update(init_lora_weights="pissa_niter_4"),
            "got init_lora_weights: pissa_niter_4, which changes",
        ),
        (lambda c, t: c.pop("r"), "describes no LoRA adapter: KeyError"),
        (lambda c, t: c.update(r=3), "has rank 3 and alpha 4, the settings say 2 and 4; set lora.rank and lora.alpha"),
        (lambda c, t: t.pop(NAME), r"holds 5 parameters, but no .*layers\.1\.self_attn\.q_proj\.lora_A"),
        (lambda c, t: t.update({NAME: torch.ones(2, 32)}), r"has shape \(2, 32\), the model's has \(2, 64\)"),
        (
            lambda c, t: t.update({"base_model.model.lm_head.weight": torch.ones(257, 64)}),
            r"holds lm_head.weight \(and 0 more\), which would not be trained",
        ),
    ],
    ids=[
        "kind",
        "dora",
        "stabilised",
        "bias",
        "pattern",
        "beginning",
        "no rank",
        "rank",
        "missing",
        "shape",
        "stranger",
    ],
)
def test_adapters_that_cannot_be_gone_on_from(tmp_path: Path, change: Any, says: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", change)
    lora = LoraConfig(match=("q_proj",), rank=2, alpha=4, path=str(adapter))
    source = folder_source(build_tiny(tmp_path / "model")).with_lora(lora)
    structure, _ = discover(source.factory, torch.float32, 1, 8, LoraRules())
    with pytest.raises(ConfigError, match=says):
        source.check_adapter(structure)


def test_what_was_trained_beside_is_gone_on_from_too(tmp_path: Path) -> None:
    head = {"base_model.model.model.norm.weight": torch.full((64,), 7.0)}
    adapter = write_adapter(tmp_path / "adapter", lambda c, t: t.update(head))
    lora = LoraConfig(match=("q_proj",), rank=2, alpha=4, path=str(adapter))
    source = folder_source(build_tiny(tmp_path / "model")).with_lora(lora)
    structure, _ = discover(source.factory, torch.float32, 1, 8, LoraRules(("norm",)))
    source.check_adapter(structure)
    assert source.weights().read("model.norm.weight", 3, 5).tolist() == [7, 7]
    assert source.weights().read("model.layers.0.self_attn.q_proj.lora_B.weight", 0, 2).tolist() == [1, 1]
    assert source.weights().read("model.layers.0.input_layernorm.weight", 0, 1) != 7


@pytest.mark.parametrize(("in_head", "says"), [(7.0, None), (8.0, r"holds other values of lm_head\.weight than of mo")])
def test_a_shared_parameter_beside_by_both_of_its_names(tmp_path: Path, in_head: float, says: str | None) -> None:
    """Exports have both names, for peft. If the two were trained apart, one of them would be lost."""
    names = {"model.embed_tokens": 7.0, "lm_head": in_head}
    both = {f"base_model.model.{name}.weight": torch.full((257, 64), value) for name, value in names.items()}
    adapter = write_adapter(tmp_path / "adapter", lambda c, t: t.update(both))
    lora = LoraConfig(match=("q_proj",), rank=2, alpha=4, path=str(adapter))
    source = folder_source(build_tiny(tmp_path / "model", tied=True)).with_lora(lora)
    structure, _ = discover(source.factory, torch.float32, 1, 8, LoraRules(("embed_tokens",)))
    with nullcontext() if says is None else pytest.raises(ConfigError, match=says):
        source.check_adapter(structure)
    assert source.weights().read("model.embed_tokens.weight", 3, 5).tolist() == [7, 7]


def test_an_adapter_by_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    fill_cache(tmp_path / "hub", "owner/adapter", files_of(write_adapter(tmp_path / "adapter", lambda c, t: None)))
    lora = LoraConfig(match=("q_proj",), rank=2, alpha=4, path="owner/adapter")
    weights = folder_source(build_tiny(tmp_path / "model")).with_lora(lora).weights()
    assert weights.read("model.layers.0.self_attn.q_proj.lora_B.weight", 0, 2).tolist() == [1, 1]


def test_no_adapter_where_one_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere/deep/er")
    source = folder_source(build_tiny(tmp_path / "model")).with_lora(LORA.model_copy(update={"path": path}))
    with pytest.raises(ConfigError, match=r"lora.path: .*nowhere/deep/er is no folder"):
        source.weights()
    with pytest.raises(ConfigError, match=r"cannot read .*adapter_config.json: No such file"):
        AdapterFolder.open(tmp_path)


def test_checksums_of_what_is_frozen(tmp_path: Path) -> None:
    """A layer's checksum does not depend on how its values are cut.

    It is another one for another bit, and none where all is trained.
    """
    source = folder_source(build_tiny(tmp_path)).with_lora(LORA)
    found = set()
    for mode in (Mode(), Mode(num_shards=3, num_fragments=2)):
        structure, plan = plan_for(source.factory, Recipe(1, precision="bf16"), mode, (1, 8))
        state = HostState(structure.layout(mode.num_fragments), plan, Recipe(1))
        state.load(source.weights())
        found.add(frozen_checksums(state.layout, state.working_of, 2))
    assert len(found) == 1
    before = found.pop()
    assert None not in before
    segment = state.layout.layers[2].segment("model.layers.1.mlp.up_proj.weight")
    state.working[state.layout.starts[2] + segment.start + 5] += 1
    pairs = zip(frozen_checksums(state.layout, state.working_of, 2), before, strict=True)
    assert [now == then for now, then in pairs] == [True, True, False, True, True]
    trained = state.layout.layers[2].segment("model.layers.1.mlp.up_proj.lora_A.weight")
    state.working[state.layout.starts[2] + trained.start] += 1
    assert frozen_checksums(state.layout, state.working_of, 1)[3:] == before[3:]
    whole, plan = plan_for(folder_source(tmp_path).factory, Recipe(1), Mode(), (1, 8))
    assert set(frozen_checksums(whole.layout(), lambda i: torch.zeros(whole.layout().layers[i].size), 1)) == {None}


def test_layers_with_equal_pairs_share_a_template(tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"match": (r"layers\.[02]\.mlp",), "dropout": 0.1})
    model = build_empty(folder_source(build_tiny(tmp_path)).with_lora(lora).factory, torch.float32)
    first, second, third = (structure(layer) for layer in model.get_submodule("model.layers").children())
    assert first == third
    assert second not in (first, third)
