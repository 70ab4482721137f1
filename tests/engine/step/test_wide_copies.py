"""A model that keeps its routers in FP32 beside bf16 has the reference's bits, in every way in which a step can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.engine.device.cuda_info import num_gpus
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.spill_bytes import SpillKind
from megatrain_ray.engine.planner.memory.spill_choice import Spillable
from megatrain_ray.engine.planner.request import SpillFirst
from tests.support.adapters import build_adapter
from tests.support.device_builders import make_cuda
from tests.support.family_models import family_batches
from tests.support.reference import MuonRecipe, Recipe, train_reference
from tests.support.routers import build_with_fp32_router
from tests.support.run_engine import Mode, folder_source, plan_for, train_engine

STEPS = 2
ALL = frozenset(range(4))
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3, boundaries=Tier.HOST)
ROUTERS = [f"model.layers.{i}.mlp.gate.wg.weight" for i in range(2)]
WAYS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "fragments, shards": (LAYERS, {}),
    "gradients that leave rounded": (LAYERS, {"grad_dtype": "bf16"}),
    "one micro-batch": (Mode(num_shards=3), {"micro_batch_size": 4}),
    "layers on the device": (Mode(hbm_layers=frozenset({1, 3}), num_shards=2), {}),
    "captured": (Mode(captured=True, hbm_layers=ALL), {"micro_batch_size": 4}),
    "gradients on the device": (Mode(gradients=Tier.HBM), {}),
    "updates in the backward": (Mode(num_shards=2), {"clip": None}),
    "sums on the host": (Mode(sums=Tier.HOST), {}),
    "on disk": (Mode(spilled=ALL, stored=ALL, num_shards=2), {}),
    "Muon": (Mode(num_shards=2), {"muon": MuonRecipe()}),
    "moments in bf16": (Mode(), {"moments": "bf16"}),
    "routers frozen": (LAYERS, {"freeze": ("gate.wg",)}),
    "routers alone": (Mode(num_shards=3), {"trainable": ("gate.wg",)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield build_with_fp32_router(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_run_is_bit_equal(folder: Path, name: str) -> None:
    mode, settings = WAYS[name]
    recipe = Recipe(STEPS, **{"micro_batch_size": 2, "precision": "bf16", "lr": 1e-2, **settings})
    batches = family_batches(STEPS)
    held_out = batches[:1] if mode in (LAYERS, Mode(hbm_layers=frozenset({1, 3}), num_shards=2)) else []
    ours = train_engine(folder, batches, recipe, mode, held_out=held_out)
    theirs = train_reference(folder, batches, recipe)
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert ours.masters.keys() == theirs.masters.keys()
    num_frozen = ours.plan.num_parameters - ours.plan.num_trained
    assert ours.plan.frozen_bytes == num_frozen * (2 if name == "routers alone" else 4)  # else only routers are frozen
    assert [name for name, m in theirs.masters.items() if not torch.equal(ours.masters[name], m)] == []
    assert [name for name, m in theirs.exp_avg.items() if not torch.equal(ours.exp_avg[name], m)] == []
    assert [s.name for layer in ours.layout.layers for s in layer.owned if s.fp32] == ROUTERS


def test_pairs_beside_layers_of_two_types_are_bit_equal(folder: Path, tmp_path: Path) -> None:
    """LoRA: the routers' FP32 values are frozen."""
    adapter = build_adapter(tmp_path, folder, ("q_proj", "v_proj"))
    recipe, batches = Recipe(STEPS, micro_batch_size=2, precision="bf16", adapter=adapter), family_batches(STEPS)
    ours = train_engine(folder, batches, recipe, LAYERS, held_out=batches[:1])
    theirs = train_reference(folder, batches, recipe)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    assert ours.masters.keys() == theirs.masters.keys()
    assert [name for name, m in theirs.masters.items() if not torch.equal(ours.masters[name], m)] == []
    assert {s.name for layer in ours.layout.layers for s in layer.owned if s.fp32} == {*ROUTERS}


def test_what_a_plan_counts_of_wide_copies(folder: Path) -> None:
    """Two more elements of the layer for each value. Layers with them keep their weights in host memory."""
    recipe, mode = Recipe(1, micro_batch_size=4, precision="bf16"), Mode()
    structure, plan = plan_for(folder_source(folder).factory, recipe, mode, (4, 20))
    layout = structure.layout()
    router = layout.layers[1].segment(ROUTERS[0])
    assert layout.layers[1].wide.size == 2048, "2 * 4 * 32, filled up"
    assert router.read_start == layout.layers[1].wide.start
    assert plan.slots.weights[0].num_bytes == 2 * layout.layers[1].size
    assert plan.gradients.accumulate_dtype is torch.float32, "one micro-batch, whose gradients have two types"
    items = Spillable(plan, structure, layout, activations=False).order(SpillFirst.GRADIENTS)
    assert not [kind for kind, layer in items if layer == 1 and kind is SpillKind.WEIGHTS]


@pytest.mark.skipif(not num_gpus(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [LAYERS, Mode(hbm_layers=ALL), Mode(hbm_layers=frozenset({1}), gradients=Tier.HBM)])
def test_a_gpu_has_the_bits_of_plain_autograd_there(folder: Path, mode: Mode) -> None:
    """Without clipping and with β₁ = 0, the first moment is the gradient. Updates there have other last bits."""
    recipe = Recipe(2, micro_batch_size=2, precision="bf16", lr=1e-2, clip=None, betas=(0.0, 0.95))
    for batches in (family_batches(1), family_batches(2)):
        ours = train_engine(folder, batches, recipe, mode, make_device=make_cuda)
        theirs = train_reference(folder, batches, replace(recipe, device="cuda"))
        assert ours.losses[0] == theirs.losses[0]
        same = [torch.equal(ours.exp_avg[name], m.cpu()) for name, m in theirs.exp_avg.items()]
        assert all(same) or len(batches) > 1
    assert ours.losses[1] == pytest.approx(theirs.losses[1], rel=1e-6)
