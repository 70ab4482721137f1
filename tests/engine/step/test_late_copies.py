"""Nothing uses memory before the copies that fill or empty it have been waited for, however late these run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from tests.support.deferred_device import LateDevice
from tests.support.reference import MuonRecipe, Recipe
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STEPS = 3
EVERY = frozenset(range(7))
LAYERS, RECOMPUTE = LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("mode", "recipe"),
    [
        pytest.param(Mode(boundaries=Tier.HOST), Recipe(STEPS), id="boundaries"),
        pytest.param(Mode(LAYERS, RECOMPUTE, boundaries=Tier.HOST), Recipe(STEPS), id="boundaries, layers outer"),
        pytest.param(Mode(kept=Tier.HOST), Recipe(STEPS), id="kept"),
        pytest.param(Mode(LAYERS, boundaries=Tier.HOST, kept=Tier.HOST, num_staying=1), Recipe(STEPS), id="kept, both"),
        pytest.param(Mode(LAYERS, boundaries=Tier.HOST, kept=Tier.HOST, to_disk=EVERY), Recipe(STEPS), id="on disk"),
        pytest.param(Mode(kept=Tier.HOST, to_disk=frozenset({1, 2})), Recipe(STEPS), id="some on disk"),
        pytest.param(Mode(sums=Tier.HOST), Recipe(STEPS, clip=None, loss_chunk_tokens=24), id="sums"),
        pytest.param(
            Mode(sums=Tier.HOST, gradients=Tier.HBM, hbm_layers=frozenset({0, 2})), Recipe(STEPS), id="sums, moved"
        ),
        pytest.param(Mode(LAYERS, num_block_slots=1), Recipe(STEPS, precision="bf16", grad_dtype="bf16"), id="rounded"),
        pytest.param(Mode(LAYERS), Recipe(STEPS, muon=MuonRecipe()), id="muon"),
    ],
)
def test_late_copies_change_no_bit(tmp_path: Path, mode: Mode, recipe: Recipe) -> None:
    build_tiny(tmp_path, num_layers=5)
    batches = tiny_batches(STEPS)
    soon, late = (
        train_engine(tmp_path, batches, recipe, mode),
        train_engine(tmp_path, batches, recipe, mode, make_device=LateDevice),
    )
    assert soon.losses == late.losses
    assert soon.grad_norms == late.grad_norms
    for name, master in soon.masters.items():
        assert torch.equal(late.masters[name], master), name
