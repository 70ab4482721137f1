"""Experts in groups: the numbers are those of the whole stack, in parts that a block can be divided between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.expert_names import place_in_whole, whole_name
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterGroup, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.expert_groups import GroupedFactory
from megatrain_ray.engine.model.parameter_rules import GroupRule, ParameterRules
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.weights.saved_values import SavedValues, as_saved
from megatrain_ray.errors import CapacityError, ConfigError, MegatrainError
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest, ParameterEntry
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.model.flop_count import FlopCount
from megatrain_ray.planning.run_spec import planning_problem, predictor
from tests.support.expert_ranges import NORM_ERROR, assert_same_but_norms
from tests.support.families import FAMILIES
from tests.support.family_models import build_family, family_batches
from tests.support.reference import MuonRecipe, Own, Recipe, train_reference
from tests.support.run_engine import Mode, folder_source, train_engine
from tests.support.runs import config

pytestmark = pytest.mark.pairwise

KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
MICRO_BATCHES, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
FIVE = {"num_experts_per_tok": 5}
STEPS = 3


def grouped(model_type: str, most: int, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any, dict[str, nn.Parameter]]:
    """Return a model with random weights, the same with experts in groups, and the first model's parameters by name."""
    factory = Architecture(FAMILIES[model_type].config | changes)
    torch.manual_seed(0)
    whole, apart = factory(dtype), GroupedFactory(factory, most)(dtype)
    whole.init_weights()
    named = dict(whole.named_parameters())
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, parameter in apart.named_parameters():
            parameter.copy_(place(named, name, parameter))
        for ours, theirs in zip(apart.buffers(), whole.buffers(), strict=True):
            ours.copy_(theirs)
    return whole.train(), apart.train(), named


def place(named: dict[str, Any], name: str, parameter: nn.Parameter) -> torch.Tensor:
    whole, start = place_in_whole(name, tuple(parameter.shape))
    values: torch.Tensor = named[whole]
    return values.detach().flatten()[start : start + parameter.numel()].view(parameter.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [3, 40])  # of 3 some experts get none
@pytest.mark.parametrize(
    ("name", "most", "changes"),
    [
        ("Mixtral", 8, {}),
        ("Mixtral", 3, FIVE),
        ("Qwen3-MoE", 4, FIVE),
        ("GPT-OSS", 2, {"num_experts_per_tok": 3}),
        ("DeepSeek-V3", 4, {}),
    ],
)
def test_outputs_and_gradients_are_bit_equal(
    name: str, most: int, changes: dict[str, int], num_tokens: int, dtype: torch.dtype
) -> None:
    whole, apart, named = grouped(name, most, dtype, **changes)
    ids = torch.randint(3, 110, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    ours, theirs = (model(input_ids=ids, labels=ids, use_cache=False) for model in (apart, whole))
    ours.loss.backward()
    theirs.loss.backward()
    assert torch.equal(ours.logits, theirs.logits)
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    of_ours = {name: p for name, p in apart.named_parameters() if p.grad is not None}
    assert {whole_name(name) for name in of_ours} == gradients.keys()
    assert any(whole_name(name) != name for name in of_ours)
    assert [name for name, p in of_ours.items() if not torch.equal(p.grad, place(gradients, name, p))] == []


def test_a_name_says_the_range() -> None:
    assert place_in_whole("layers.3.experts.[4:8].up", (4, 6, 5)) == ("layers.3.experts.up", 120)
    assert place_in_whole("layers.3.mlp.up", (6, 5)) == ("layers.3.mlp.up", 0)
    assert whole_name("layers.3.experts.[12:16].up_bias") == "layers.3.experts.up_bias"
    assert whole_name("layers.3.experts.0-3.up") == "layers.3.experts.0-3.up", "a module's own name"


def test_a_range_that_a_save_lacks_is_told() -> None:
    """Parts of one parameter, whose last is missing."""
    parameters = [ParameterEntry(f"experts.[{i}:{i + 2}].up", (2, 3), 0) for i in (0, 2)]
    layers = tuple(LayerEntry(f"part{i}", 6, (p,)) for i, p in enumerate(parameters))
    manifest = Manifest(1, 1, 1, 0, "fp32", {"master": 4}, layers, {}, {}, {}, ())
    for num_experts, missing in ((4, 0), (6, 6)):
        block = FlatLayout.build("block", [ParameterSpec("experts.up", "up", (num_experts, 3))])
        piece = Piece("block", "master", 0, 3 * num_experts, [memoryview(bytearray(12 * num_experts))])
        layout = ModelLayout((block,), ("experts.up",))
        if not missing:
            assert [part.layer for part in as_saved([piece], manifest, layout)] == ["part0", "part1"]
            continue
        with pytest.raises(MegatrainError, match=rf"^the save does not hold {missing} of the elements of experts\.up$"):
            as_saved([piece], manifest, layout)
    with SavedValues.open(Path(), manifest) as values, pytest.raises(MegatrainError, match=r"all of experts\.up, elem"):
        values.read("experts.up", 12, 18, ExportDtype.FP32)


@pytest.mark.parametrize(
    ("name", "most", "implementation", "expected"),
    [
        ("Mixtral", 8, "grouped_mm", 8),
        ("Mixtral", 7, "grouped_mm", 4),
        ("Mixtral", 1, "grouped_mm", 0),
        ("GPT-OSS", 8, "grouped_mm", 2),  # biases of 32 elements an expert: a vector of an update would be cut
        ("Mixtral", 8, "eager", 0),
    ],
)
def test_number_of_groups(name: str, most: int, implementation: str, expected: int) -> None:
    plain = Architecture(FAMILIES[name].config)

    def factory(dtype: torch.dtype) -> Any:
        model = plain(dtype)
        model.config._experts_implementation = implementation
        return model

    with torch.device("meta"):
        model = GroupedFactory(factory, most)(torch.float32)
    names = [name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")]
    assert len({name.rpartition(".")[0] for name in names if whole_name(name) != name}) == expected


@pytest.mark.spread(6)  # each way once, in either precision
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "changes", "mode"),
    [
        ("Mixtral", {}, Mode(MICRO_BATCHES, KEEP, num_shards=3)),
        ("Mixtral", {}, Mode(LAYERS, RECOMPUTE, boundaries=Tier.HOST)),
        ("Mixtral", {}, Mode(LAYERS, KEEP, hbm_layers=frozenset({0, 2, 5}))),
        ("Qwen3-MoE", FIVE, Mode(MICRO_BATCHES, RECOMPUTE, sums=Tier.HOST)),
        ("Qwen3-MoE", FIVE, Mode(LAYERS, KEEP, boundaries=Tier.HOST, kept=Tier.HOST)),
        ("DeepSeek-V3", {}, Mode(MICRO_BATCHES, KEEP, boundaries=Tier.HOST, kept=Tier.HOST)),
    ],
)
def test_every_way_to_run_groups_is_bit_equal(
    tmp_path: Path, name: str, changes: dict[str, int], mode: Mode, precision: str
) -> None:
    """A clip that does not bite: of a gradient's norm the last bits differ."""
    build_family(name, tmp_path, **changes)
    recipe, batches = Recipe(STEPS, micro_batch_size=2, precision=precision, clip=1e3), family_batches(STEPS)
    ours = train_engine(tmp_path, batches, recipe, replace(mode, block_parts=8))
    theirs = train_reference(tmp_path, batches, recipe)
    assert_same_but_norms(ours, theirs)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=NORM_ERROR)
    assert any(".experts.[2:" in layer.name for layer in ours.plan.layers)


def test_clipped_steps_differ_by_the_norm_alone(tmp_path: Path) -> None:
    build_family("Mixtral", tmp_path)
    recipe, batches = Recipe(STEPS, micro_batch_size=2, clip=0.1), family_batches(STEPS)
    ours = train_engine(tmp_path, batches, recipe, Mode(LAYERS, KEEP, block_parts=8))
    theirs = train_reference(tmp_path, batches, recipe)
    assert ours.losses == pytest.approx(theirs.losses, rel=NORM_ERROR)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=NORM_ERROR)


@pytest.mark.parametrize(
    "settings",
    [
        {"freeze": (r"experts\.gate_up_proj",)},
        {"groups": (Own(r"mlp\.experts\.down_proj", lr=1e-4, weight_decay=0.0),)},
        {"muon": MuonRecipe()},
        {"moments": "bf16"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_parameters_mean_whole_ones(tmp_path: Path, settings: dict[str, Any]) -> None:
    build_family("Mixtral", tmp_path)
    recipe, batches = Recipe(STEPS, micro_batch_size=2, clip=None, **settings), family_batches(STEPS)
    ours = train_engine(tmp_path, batches, recipe, Mode(LAYERS, KEEP, num_shards=2, block_parts=4))
    assert_same_but_norms(ours, train_reference(tmp_path, batches, recipe))


def test_a_pattern_near_experts_is_told_their_whole_name(tmp_path: Path) -> None:
    build_family("Mixtral", tmp_path)
    factory = GroupedFactory(folder_source(tmp_path).factory, 4)
    rules = ParameterRules(groups=(GroupRule((r"experts\.gate_up_projs",), ParameterGroup(lr_scale=0.1)),))
    with pytest.raises(ConfigError, match=r"near it are .*experts\.gate_up_proj\b"):
        discover(factory, torch.float32, 1, 8, rules, block_parts=4)


def test_flops_are_those_of_whole_stacks(tmp_path: Path) -> None:
    build_family("Qwen3-MoE", tmp_path, **FIVE)
    sources = [replace(folder_source(tmp_path), expert_groups=n) for n in (1, 4)]
    structures = [discover(s.factory, torch.float32, 1, 20, block_parts=s.expert_groups)[0] for s in sources]
    assert len(structures[1].layers) > len(structures[0].layers)
    whole, apart = (FlopCount.of(structure, sources[0]) for structure in structures)
    assert whole.per_step(100, 2000) == apart.per_step(100, 2000)


def mixtral(folder: Path, **hardware: Any) -> TrainConfig:
    """Return the configuration of a model with two layers of Mixtral-8x7B's shape."""
    shape = {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }  # fmt: skip
    tree = config(
        folder, shape, data__seq_len=1024, train__precision="bf16", train__batch_size=8,
        hardware={"device": "cuda", "hbm_limit": "12GB", "ram_limit": "256GiB", **hardware},
    )  # fmt: skip
    return TrainConfig.model_validate(tree).resolve()


@pytest.mark.long
def test_a_layer_larger_than_the_slots_is_planned(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"^needs 14\.\d+ GiB of device memory, 11\.18 GiB available"):
        planning_problem(mixtral(tmp_path, block_parts=1)).plan()
    question = planning_problem(mixtral(tmp_path))
    plan = question.plan()
    assert (plan.compute.block_parts, plan.compute.expert_groups, question.source.expert_groups) == (8, 8, 8)
    assert "parts     blocks are divided into 8 layers each, experts into 8 groups" in describe(plan)
    assert plan.prediction
    again = predictor(mixtral(tmp_path), plan)(plan.prediction.profile)
    assert again.step_s == plan.prediction.step_s
    assert plan.total_bytes(Tier.HBM) <= 12e9
    assert question.structure.layers[2].name == "layers.0.mlp.experts.[1:2]"


def test_another_number_of_parts_than_of_groups_is_found_again(tmp_path: Path) -> None:
    """32 experts have four groups of eight, where six parts are asked for."""
    shape = FAMILIES["DeepSeek-V3"].config | {
        "n_routed_experts": 32, "moe_intermediate_size": 256, "n_group": 1, "num_hidden_layers": 3,
    }  # fmt: skip
    tree = config(tmp_path, shape, hardware={"device": "cuda", "hbm_limit": "12GB", "block_parts": 6})
    asked = TrainConfig.model_validate(tree).resolve()
    plan = planning_problem(asked).plan()
    assert plan.prediction and plan.compute.expert_groups == 4 < plan.compute.block_parts
    again = predictor(asked, plan)(plan.prediction.profile)
    assert again.step_s == plan.prediction.step_s
