"""Blocks divided into parts: the numbers are those of whole ones, in less of the device's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, RecurrentGemmaConfig

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery.block_parts import _cuts
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.part_memory import release_spent
from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import Part
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.step import step_runner
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.model.flop_count import FlopCount
from megatrain_ray.planning import run_spec
from megatrain_ray.planning.run_spec import planning_problem, predictor
from megatrain_ray.virtual_clock import Stage
from tests.support.expert_ranges import NORM_ERROR, assert_same_but_norms
from tests.support.families import FAMILIES
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, folder_source, train_engine
from tests.support.runs import config
from tests.support.tiny import build_tiny, tiny_batches

KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
MICRO_BATCHES, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
PARTS = ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # of Llama, where there are as many as can be
STEPS = 3
# Of other families their own configurations, but for dropout.
WITHOUT_DROPOUT: dict[str, dict[str, float]] = {
    "GPT-2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GPT-2, untied": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GPT-NeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Bloom": {"hidden_dropout": 0.0},
}
# Their experts are divided, too.
WITH_GROUPS = {"Mixtral", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3", "GLM-4.5", "Granite-MoE, shared", "Jamba"}
REFUSED = {
    "Qwen3-Next": "saves for its backward what it makes after",
    "Gemma 3n": "does not call each module that holds weights of its own exactly once",
    "Zamba2": "outside of",
}


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    assert ours.grad_norms == theirs.grad_norms
    assert_same_but_norms(ours, theirs)


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_divided_families_are_bit_equal(tmp_path: Path, name: str) -> None:
    build_family(name, tmp_path, **WITHOUT_DROPOUT.get(name, {}))
    mode = Mode(LAYERS, KEEP, num_shards=2, boundaries=Tier.HOST, kept=Tier.HOST, block_parts=8)
    has_groups = name in WITH_GROUPS
    recipe = Recipe(STEPS, micro_batch_size=2, seed=3, clip=None if has_groups else 1.0)
    batches = family_batches(STEPS)
    ours = train_engine(tmp_path, batches, recipe, mode)
    theirs = train_reference(tmp_path, batches, recipe, frozen=FAMILIES[name].frozen)
    assert_same_but_norms(ours, theirs)
    assert ours.grad_norms == (pytest.approx(theirs.grad_norms, rel=NORM_ERROR) if has_groups else theirs.grad_norms)
    assert has_groups == any(whole_name(parameter) != parameter for parameter in ours.masters)
    assert ours.plan.compute.block_parts > 1
    assert all(layer.name.count(".") > 1 for layer in ours.plan.layers[1:-1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    build_family(name, tmp_path)
    with pytest.raises(ConfigError, match=rf"^hardware\.block_parts: .* cannot be divided: it .*{REFUSED[name]}"):
        discover(folder_source(tmp_path).factory, torch.float32, 1, 20, block_parts=2)


def test_a_block_that_keeps_what_it_computed_is_not_divided() -> None:
    """RecurrentGemma's states, which no part knows of."""
    shape = RecurrentGemmaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, lru_width=16, attention_window_size=16,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(shape, dtype=dtype)

    kept = r"keeps model\.layers\.0\.temporal_block\.rg_lru\.recurrent_states from one forward for the next"
    with pytest.raises(ConfigError, match=kept):
        discover(factory, torch.float32, 1, 20, block_parts=2)


def test_blocks_that_draw_random_numbers_are_not_divided(tmp_path: Path) -> None:
    """Each layer draws its own, so that parts would draw others than whole blocks."""
    build_tiny(tmp_path, attention_dropout=0.1)
    with pytest.raises(ConfigError, match="draws random numbers, which are drawn layer by layer"):
        discover(folder_source(tmp_path).factory, torch.float32, 1, 32, block_parts=2)


MODES = {
    "whole forwards": Mode(MICRO_BATCHES, KEEP),
    "recomputed, three shards": Mode(MICRO_BATCHES, RECOMPUTE, num_shards=3),
    "layers outer, recomputed": Mode(LAYERS, RECOMPUTE, num_shards=2),
    "boundaries on the host": Mode(LAYERS, RECOMPUTE, boundaries=Tier.HOST),
    "all on the host": Mode(LAYERS, KEEP, boundaries=Tier.HOST, kept=Tier.HOST),
    "all on the host, one by one": Mode(MICRO_BATCHES, KEEP, boundaries=Tier.HOST, kept=Tier.HOST, num_staying=5),
    "what glue saves on the host": Mode(LAYERS, RECOMPUTE, kept=Tier.HOST),
    "sums on the host": Mode(MICRO_BATCHES, KEEP, sums=Tier.HOST, kept=Tier.HOST),
    "parts in HBM": Mode(LAYERS, KEEP, hbm_layers=frozenset({0, 2, 7})),
    "on disk": Mode(
        LAYERS, KEEP, boundaries=Tier.HOST, kept=Tier.HOST, spilled=frozenset({1, 2, 3, 6}), stored=frozenset({2, 5}),
        on_disk=frozenset({3}), to_disk=frozenset({1, 2, 3, 4}),
    ),
}  # fmt: skip


@pytest.mark.spread(10)  # each way once, in either precision
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODES)
def test_every_way_to_run_parts_is_bit_equal(tmp_path: Path, name: str, precision: str) -> None:
    build_tiny(tmp_path, tied=name == "layers outer, recomputed")
    mode, recipe = replace(MODES[name], block_parts=8), Recipe(STEPS, micro_batch_size=2, precision=precision)
    batches = tiny_batches(STEPS)
    ours = train_engine(tmp_path, batches, recipe, mode)
    assert_equal(ours, train_reference(tmp_path, batches, recipe))
    names = [layer.name for layer in ours.plan.layers[1:-1]]
    assert names == [f"layers.{i}.{part}" for i in range(3) for part in PARTS]
    ran = [r.op.layer for r in ours.records[0] if r.op.name == "forward" and r.stage is Stage.COMPUTE]
    assert set(ran) == set(range(14))
    if mode.kept is Tier.HOST and mode.activations is RECOMPUTE:  # what nobody computes again, and nothing else
        kept = {r.op.layer for r in ours.records[0] if r.op.name == "kept" and r.stage is Stage.D2H}
        assert {ours.plan.layers[i].name.split(".", 2)[2] for i in kept} == {"mlp.gate_proj", "mlp.up_proj"}
    if mode.boundaries is Tier.HOST:
        left = {r.op.layer for r in ours.records[0] if r.op.name == "boundary" and r.stage is Stage.D2H}
        assert left == {i for i, layer in enumerate(ours.plan.layers) if layer.boundary is not Tier.HBM}


def test_clipped_and_unclipped_steps_and_chunks_of_the_loss(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    batches = tiny_batches(STEPS)
    for changes in ({"clip": None}, {"clip": 0.5, "loss_chunk_tokens": 7}):
        recipe = Recipe(STEPS, micro_batch_size=1, **changes)  # type: ignore[arg-type]
        ours = train_engine(tmp_path, batches, recipe, Mode(LAYERS, RECOMPUTE, block_parts=3))
        assert_equal(ours, train_reference(tmp_path, batches, recipe))


def test_parts_take_less_of_the_device(tmp_path: Path) -> None:
    """Slots, and slots of gradients, are as large as the largest part."""
    build_tiny(tmp_path)
    recipe, batches = Recipe(1, micro_batch_size=2), tiny_batches(1)
    of_parts = {n: train_engine(tmp_path, batches, recipe, Mode(LAYERS, KEEP, block_parts=n)) for n in (1, 2, 4)}
    for name in ("slots", "gradient slots"):
        sizes = [next(row.num_bytes for row in of_parts[n].plan.memory_items if row.name == name) for n in (1, 2, 4)]
        assert sizes[0] > sizes[1] > sizes[2], name
    assert of_parts[1].device_bytes > of_parts[2].device_bytes > of_parts[4].device_bytes
    matrix = 64 * 176
    assert (
        of_parts[4].plan.slots.weights[0].num_bytes < 2 * 4 * matrix
    )  # and a norm; three matrices and attention are a block


def test_what_a_part_returned_and_nothing_reads_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of what attention returned is free already, because its block holds it no more."""
    freed: list[tuple[str, int]] = []

    def noted(forward_pass: ForwardPass, part: Part) -> None:
        calls = [(path, forward_pass.last_call(path)) for path, _ in part.spent]
        storages = {path: call.output_storage(0) for path, call in calls if call}
        before = {path: storage.nbytes() if storage else 0 for path, storage in storages.items()}
        release_spent(forward_pass, part)
        assert not any(storage.nbytes() for storage in storages.values() if storage)
        freed.extend((path.rpartition(".")[2], num_bytes) for path, num_bytes in before.items())

    monkeypatch.setattr(step_runner, "release_spent", noted)
    build_tiny(tmp_path)
    recipe, batches = Recipe(1, micro_batch_size=4), tiny_batches(1)
    ours = train_engine(tmp_path, batches, recipe, Mode(LAYERS, KEEP, block_parts=8))
    assert_equal(ours, train_reference(tmp_path, batches, recipe))
    assert freed == [("self_attn", 0), ("down_proj", 4 * 32 * 64 * 4)] * 3


def test_bytes_of_parts_are_those_of_a_trial() -> None:
    """Bytes are those counted by hand, for 2 sequences of 64 tokens in bf16, 128 wide, with an MLP of 256.

    Everything that enters a call is counted once, where it leaves.
    """
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=64,
    )

    def factory(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    structure, activations = discover(factory, torch.bfloat16, 2, 64, block_parts=8)
    wide, inner = 2 * 64 * 128 * 2, 2 * 64 * 256 * 2
    assert [activations.boundary[i] for i in structure.blocks[0]] == [
        2 * wide,  # into the first norm and into attention; the sum behind stays, for the sum behind the MLP
        0,  # what enters the gate enters the next part too
        wide,
        wide + inner,  # into the second norm, and into the last matrix
    ]
    # SiLU's input; its result and the other factor of the product.
    assert [activations.between[i] for i in structure.blocks[0]] == [0, inner, 2 * inner, 0]
    assert all(activations.private[i] for i in structure.blocks[0])
    assert not any(activations.replayable)
    doubled = activations.times(2)
    assert doubled.between == tuple(2 * b for b in activations.between)
    whole = discover(factory, torch.bfloat16, 2, 64)[0]
    assert whole.undivided_names == tuple(dict.fromkeys(structure.undivided_names))
    assert whole.parameter_order == structure.parameter_order
    assert sum(whole.attention_widths) == sum(structure.attention_widths)


def test_flops_are_those_of_whole_blocks(tmp_path: Path) -> None:
    """Only some blocks have windows."""
    build_family("Gemma 2", tmp_path)
    source = folder_source(tmp_path)
    counts = [FlopCount.of(discover(source.factory, torch.float32, 1, 20, block_parts=n)[0], source) for n in (1, 8)]
    assert counts[0].per_step(100, 2000) == counts[1].per_step(100, 2000)


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([1, 100, 1, 90, 90, 90], 6, [(0, 3), (3, 4), (4, 5), (5, 6)]),  # norms go with what they are beside
        ([1, 100, 1, 90, 90, 90], 2, [(0, 4), (4, 6)]),
        ([1, 100, 1, 90, 90, 90], 3, [(0, 3), (3, 5), (5, 6)]),
        ([60, 40], 8, [(0, 1), (1, 2)]),
    ],
)
def test_the_largest_part_is_as_small_as_can_be(sizes: list[int], most: int, expected: list[tuple[int, int]]) -> None:
    assert _cuts(sizes, most) == expected


def tight(folder: Path, **hardware: Any) -> TrainConfig:
    """Whole blocks, of 111 million parameters, need 2.5 GiB of the device."""
    shape = {"model_type": "llama", "vocab_size": 512, "hidden_size": 2048, "intermediate_size": 16384}
    tree = config(
        folder, {**shape, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4},
        data__seq_len=256, train__precision="bf16",
        hardware={"device": "cuda", "hbm_limit": "2GiB", "ram_limit": "64GiB", **hardware},
    )  # fmt: skip
    return TrainConfig.model_validate(tree).resolve()


def test_blocks_are_divided_where_whole_ones_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"^needs 2\.\d+ GiB of device memory, 2\.00 GiB available"):
        planning_problem(tight(tmp_path, block_parts=1)).plan()
    with pytest.raises(CapacityError):
        planning_problem(tight(tmp_path, block_parts=2)).plan()
    chosen = planning_problem(tight(tmp_path)).plan()
    assert chosen.compute.block_parts == 4
    assert chosen.total_bytes(Tier.HBM) <= 2 << 30
    assert "parts     blocks are divided into 4 layers each" in describe(chosen)
    assert chosen.prediction
    again = predictor(tight(tmp_path), chosen)(chosen.prediction.profile)
    assert again.step_s == chosen.prediction.step_s
    assert planning_problem(tight(tmp_path, hbm_limit="24GiB")).plan().compute.block_parts == 1
    assert planning_problem(tight(tmp_path, hbm_limit="24GiB", block_parts=4)).plan().compute.block_parts == 4


def test_parts_of_a_block_do_not_help_where_host_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = run_spec._problem_of_parts
    monkeypatch.setattr(run_spec, "_problem_of_parts", lambda *args: asked.append(args[3]) or ask(*args))
    with pytest.raises(CapacityError, match=r"^needs .* of host RAM"):
        planning_problem(tight(tmp_path, ram_limit="6GiB", hbm_limit="24GiB", hbm_layers=0)).plan()
    assert asked == [1]
