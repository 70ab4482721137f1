"""Frozen parameters and groups: parity with torch's requires_grad_(False) and parameter groups, and nothing in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.layer_calls.layer_call import LayerCall
from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import Objective, Targets, chunk_sums, chunked_loss
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.virtual_clock import Stage
from tests.support.reference import Own, Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

Gradients = list[torch.Tensor | None]
Pending = Sequence[torch.Tensor | None]

STEPS = 3
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
OUTER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
EMBEDDING = "embed_tokens"

# Of a model with three blocks, layers 0 (embedding) to 4 (head): what is frozen, and the lowest layer that is not.
FREEZES = {
    "embedding": (Recipe(STEPS, freeze=(EMBEDDING,)), 1),
    "lower blocks": (Recipe(STEPS, freeze=(EMBEDDING, r"layers\.[01]\.")), 3),
    "a block between": (Recipe(STEPS, freeze=(r"layers\.1\.",)), 0),
    "all but the head": (Recipe(STEPS, trainable=("lm_head",)), 4),
    "all but the last norm": (Recipe(STEPS, trainable=("model.norm",)), 4),
    "head": (Recipe(STEPS, freeze=("lm_head",)), 0),
    "last layer": (Recipe(STEPS, freeze=("lm_head", r"model\.norm")), 0),
    "parts of blocks": (Recipe(STEPS, freeze=(EMBEDDING, "mlp", r"1\.self_attn\.q_proj")), 1),
    "all but norms": (Recipe(STEPS, trainable=("norm",)), 1),
    "one matrix": (Recipe(STEPS, trainable=(r"layers\.1\.mlp\.up_proj",)), 2),
}
MODES = (
    Mode(OUTER, KEEP),
    Mode(OUTER, RECOMPUTE, num_shards=2, num_fragments=3),
    Mode(LAYERS, RECOMPUTE, num_shards=3),
    Mode(LAYERS, KEEP, num_fragments=3),
    Mode(OUTER, RECOMPUTE, num_shards=2, sums=Tier.HOST),
)


def run(folder: Path, recipe: Recipe, mode: Mode, *, tied: bool = False) -> tuple[EngineResult, Result]:
    build_tiny(folder, tied=tied)
    batches = tiny_batches(recipe.steps)
    return train_engine(folder, batches, recipe, mode), train_reference(folder, batches, recipe)


def assert_equal(ours: EngineResult, theirs: Result, folder: Path) -> None:
    """Bit-equal; what is frozen is what streams of the weights it began with, and there is no state of it."""
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert ours.masters.keys() == ours.exp_avg.keys() == theirs.masters.keys()
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg[name], theirs.exp_avg[name]), name
    assert ours.exp_avg_sq.keys() == theirs.exp_avg_sq.keys()
    for name, v in theirs.exp_avg_sq.items():
        assert torch.equal(ours.exp_avg_sq[name], v), name
    stored = WeightFolder.open(folder)
    assert {*ours.frozen, *ours.masters} == stored.names
    for name, frozen in ours.frozen.items():
        master = stored.read(name, 0, frozen.numel()).view(frozen.shape)
        assert torch.equal(frozen, to_working(master) if frozen.dtype == torch.bfloat16 else master), name


@pytest.mark.parametrize(("name", "mode"), [(name, MODES[k % 3]) for k, name in enumerate(FREEZES)], ids=[*FREEZES])
def test_fp32_is_bit_equal(tmp_path: Path, name: str, mode: Mode) -> None:
    recipe, lowest = FREEZES[name]
    ours, theirs = run(tmp_path, replace(recipe, micro_batch_size=2), mode)
    assert_equal(ours, theirs, tmp_path)
    assert_nothing_in_vain(ours, mode, lowest)


@pytest.mark.parametrize("name", ["embedding", "lower blocks", "a block between", "all but the head"])
def test_boundaries_on_the_host_are_those_behind_the_lowest_trained_layer(tmp_path: Path, name: str) -> None:
    recipe, lowest = FREEZES[name]
    ours, theirs = run(tmp_path, replace(recipe, micro_batch_size=2), Mode(LAYERS, boundaries=Tier.HOST))
    assert_equal(ours, theirs, tmp_path)
    moved = {r.op.layer for records in ours.records for r in records if r.op.name == "boundary"}
    planned = {i for i, layer in enumerate(ours.plan.layers) if layer.boundary is Tier.HOST}
    assert moved == planned == set(range(lowest + 1, 4))


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", FREEZES)
def test_what_is_kept_on_the_host_is_of_layers_with_a_backward(tmp_path: Path, name: str) -> None:
    recipe, lowest = FREEZES[name]
    ours, theirs = run(tmp_path, replace(recipe, micro_batch_size=2), Mode(LAYERS, kept=Tier.HOST))
    assert_equal(ours, theirs, tmp_path)
    moved = {r.op.layer for records in ours.records for r in records if r.op.name == "kept"}
    planned = {i for i, layer in enumerate(ours.plan.layers) if layer.kept is Tier.HOST}
    assert moved == planned == set(range(max(1, lowest), 4))


@pytest.mark.spread(5)
@pytest.mark.parametrize(
    ("name", "clip"), [(name, (None, 0.05)[k % 2]) for k, name in enumerate(FREEZES)], ids=[*FREEZES]
)
def test_bf16_is_bit_equal(tmp_path: Path, name: str, clip: float | None) -> None:
    recipe = replace(FREEZES[name][0], precision="bf16", clip=clip, loss_chunk_tokens=24)
    ours, theirs = run(tmp_path, recipe, MODES[3])
    assert clip is None or max(theirs.grad_norms) > clip, "clipping must bite"
    assert_equal(ours, theirs, tmp_path)


@pytest.mark.parametrize(
    ("freeze", "mode"),
    [((EMBEDDING,), MODES[0]), (("lm_head",), MODES[3]), *(((r"layers\.1\.", "norm"), mode) for mode in MODES[1::3])],
)
def test_tied_weights_are_bit_equal(tmp_path: Path, freeze: tuple[str, ...], mode: Mode) -> None:
    """A shared parameter goes by either of its names: freezing the head freezes the embedding."""
    recipe = Recipe(STEPS, freeze=freeze, precision="bf16", clip=0.5)
    ours, theirs = run(tmp_path, recipe, mode, tied=True)
    assert ("model.embed_tokens.weight" in ours.frozen) is (freeze[0] != r"layers\.1\.")
    assert_equal(ours, theirs, tmp_path)


@pytest.mark.parametrize(("precision", "schedule"), [("fp32", "cosine"), ("bf16", "constant")])
def test_groups_are_bit_equal(tmp_path: Path, precision: str, schedule: str) -> None:
    own = (Own(r"layers\.0\.", lr=1e-4), Own("norm", weight_decay=0.5), Own("proj", lr=3e-3, weight_decay=0.0))
    recipe = Recipe(STEPS, precision=precision, schedule=schedule, min_lr=1e-5, groups=own, freeze=(r"2\.mlp",))
    ours, theirs = run(tmp_path, recipe, Mode(LAYERS, KEEP, num_shards=2))
    assert_equal(ours, theirs, tmp_path)
    for dropped in range(3):
        others = replace(recipe, groups=tuple(g for i, g in enumerate(own) if i != dropped))
        assert train_reference(tmp_path, tiny_batches(STEPS), others).losses != theirs.losses, "each group matters"


@pytest.mark.parametrize("name", ["all but the head", "one matrix", "parts of blocks"])
def test_sums_that_wait_on_the_host_are_bit_equal(tmp_path: Path, name: str) -> None:
    """They come back ahead of the next visit that adds to them, which may not be the next visit."""
    ours, theirs = run(tmp_path, replace(FREEZES[name][0], grad_dtype="bf16"), MODES[4])
    assert_equal(ours, theirs, tmp_path)


def assert_nothing_in_vain(result: EngineResult, mode: Mode, lowest: int) -> None:
    """Assert that there is no backward below the lowest trained layer, and no gradient or update of what is frozen."""
    records, plan = result.records[0], result.plan
    num_layers, m = len(plan.layers), plan.step.num_micro_batches
    count = Counter((r.op.name, r.op.layer) for r in records)
    backward = {layer for name, layer in count if name == "backward"}
    assert backward <= set(range(lowest, num_layers))
    assert {layer for name, layer in count if name == "recompute"} <= backward
    trained = [i for i, layer in enumerate(plan.layers) if layer.num_trained]
    assert trained[0] == lowest
    assert [layer for name, layer in count if name == "offload"] == trained[::-1]
    assert all(count["offload", layer] == 1 for layer in trained)
    assert {r.op.layer for r in records if r.stage is Stage.OPTIMIZER} <= set(trained)
    if mode.activations is RECOMPUTE:
        num_forwards = STEPS * m * (num_layers + len(backward - {0, num_layers - 1}))
        assert result.count("forward", "recompute") == num_forwards


def test_no_gradient_goes_below_the_lowest_trained_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in there wants none, and of the layers below nothing is kept."""
    wanted: dict[str, int] = {}
    backward = LayerCall.backward

    def watched(call: LayerCall, of_outputs: Gradients, pending: Pending) -> tuple[Gradients, Gradients]:
        wanted[call.path] = len(call.ports)
        return backward(call, of_outputs, pending)

    monkeypatch.setattr(LayerCall, "backward", watched)
    build_tiny(tmp_path)
    train_engine(tmp_path, tiny_batches(1), FREEZES["lower blocks"][0], Mode())
    assert wanted == {"model.norm": 1, "model.layers.2": 0}


@pytest.mark.parametrize("trained", [False, True])
def test_a_call_that_needs_no_gradient_keeps_nothing(trained: bool) -> None:
    weight, kept = torch.ones(3, requires_grad=trained), list[torch.Tensor]()
    saving = torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: weight)
    call = LayerCall(0, "layer", (torch.ones(3),), {})
    outcome = call.forward(lambda hidden: (hidden * weight, {}), [weight], saving)
    assert call.needs_gradient is call.has_graph is outcome.result.requires_grad is trained
    assert bool(kept) is trained


@pytest.mark.parametrize(("hidden_wants", "head_wants"), [(True, False), (False, True)])
def test_the_loss_takes_no_gradient_in_vain(hidden_wants: bool, head_wants: bool) -> None:
    hidden = torch.randn(1, 4, 3, requires_grad=hidden_wants)
    head, targets = torch.randn(5, 3, requires_grad=head_wants), torch.tensor([[1, 2, 3, 4]])
    sums = partial(chunk_sums, lambda h: h @ head.T, Objective())
    found = chunked_loss(sums, hidden, Targets(targets), [head], chunk_tokens=3, total_weight=4)
    assert (found.hidden is not None) is hidden_wants
    assert [gradient is not None for gradient in found.parameters] == [head_wants]
