"""What a plan says that a step moves is what the engine moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.engine.activations import activation_store
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.measure.plan_traffic import moved_bytes, state_share
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.virtual_clock import Record, Stage
from tests.support.reference import MuonRecipe, Recipe
from tests.support.run_engine import Mode, folder_source, plan_for, train_engine
from tests.support.tiny import build_tiny, tiny_batches

MUON = MuonRecipe()


def moved(records: Iterable[Record], stage: Stage) -> int:
    return sum(record.op.num_bytes for record in records if record.stage is stage)


@pytest.mark.parametrize(
    ("recipe", "mode", "tied"),
    [
        (Recipe(2, micro_batch_size=4), Mode(), False),
        (Recipe(2, micro_batch_size=4), Mode(spilled=frozenset({1, 2, 3})), False),
        (Recipe(2, micro_batch_size=4), Mode(spilled=frozenset({2, 3}), stored=frozenset({1, 2, 3})), False),
        (Recipe(2, micro_batch_size=1, precision="bf16"), Mode(num_fragments=3), True),
        (Recipe(2, micro_batch_size=2, precision="bf16", grad_dtype="bf16"), Mode(LoopOrder.LAYERS_OUTER), False),
        (Recipe(2, micro_batch_size=1), Mode(activations=ActivationPolicy.RECOMPUTE, sums=Tier.HOST), True),
        (Recipe(2, micro_batch_size=1), Mode(sums=Tier.HOST, hbm_layers=frozenset({0, 2})), True),
        (Recipe(2, micro_batch_size=1), Mode(LoopOrder.LAYERS_OUTER, boundaries=Tier.HOST), False),
        (Recipe(2, micro_batch_size=2), Mode(boundaries=Tier.HOST), False),
        (Recipe(2, micro_batch_size=2), Mode(boundaries=Tier.HOST, segment=3, num_block_slots=2), False),
        (Recipe(2, micro_batch_size=2), Mode(kept=Tier.HOST, num_staying=1), False),
        (Recipe(2, micro_batch_size=1), Mode(LoopOrder.LAYERS_OUTER, boundaries=Tier.HOST, kept=Tier.HOST), False),
        (Recipe(2, micro_batch_size=2, freeze=("embed", r"layers\.0\.")), Mode(boundaries=Tier.HOST), False),
        (Recipe(2, micro_batch_size=2, muon=MUON), Mode(num_shards=2), False),
        (Recipe(2, micro_batch_size=2, muon=MUON, clip=None), Mode(), False),
        (Recipe(2, micro_batch_size=2, freeze=("layers.0",)), Mode(), False),
    ],
)
def test_the_bytes_are_those_that_the_engine_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, mode: Mode, tied: bool
) -> None:
    """Small storages too."""
    monkeypatch.setattr(activation_store, "SMALL_BYTES", 1)
    folder = build_tiny(tmp_path / "model", tied=tied)
    structure, plan = plan_for(folder_source(folder).factory, recipe, mode, (4, 32))
    records = train_engine(folder, tiny_batches(2), recipe, mode).records
    written = [r.op.num_bytes for of_step in records for r in of_step if r.op.name in ("write", "store")]
    assert moved_bytes(plan, structure) == {
        **{stage.value: moved(records[-1], stage) for stage in (Stage.H2D, Stage.D2H)},
        Stage.DISK.value: sum(written),  # of two steps, and as much is read
    }


def test_gradients_that_stay_on_the_device_do_not_move(tmp_path: Path) -> None:
    recipe = Recipe(2, micro_batch_size=1)
    structure, plan = plan_for(
        folder_source(build_tiny(tmp_path / "model")).factory, recipe, Mode(sums=Tier.HOST), (4, 32)
    )
    moving = moved_bytes(plan, structure)
    layers = (replace(plan.layers[0], gradients=Tier.HBM, updated_by="gpu"), *plan.layers[1:])
    fewer = moved_bytes(replace(plan, layers=layers), structure)
    complete = 4 * structure.layout().layers[0].trained.size  # unfinished sums come and go all the same
    assert (moving["d2h"] - fewer["d2h"], moving["h2d"] - fewer["h2d"]) == (complete, 0)


def test_gradients_that_wait_on_the_device_move_all_the_same(tmp_path: Path) -> None:
    factory = folder_source(build_tiny(tmp_path / "model")).factory
    recipe = Recipe(2, micro_batch_size=4)
    on_device, on_host = (
        moved_bytes(plan, structure)
        for structure, plan in (
            plan_for(factory, recipe, Mode(gradients=tier), (4, 32)) for tier in Tier if tier != Tier.NVME
        )
    )
    assert on_device == on_host
    assert on_host["d2h"] > 0


def test_each_of_several_gpus_copies_its_part_of_gradients_and_matrices(tmp_path: Path) -> None:
    recipe = Recipe(2, micro_batch_size=4, muon=MUON)
    factory = folder_source(build_tiny(tmp_path / "model")).factory
    structure, plan = plan_for(factory, recipe, Mode(num_shards=2), (4, 32))
    one, two, parts = (
        moved_bytes(each, structure)
        for each in (
            plan,
            replace(plan, hosts=replace(plan.hosts, num_gpus=2)),
            replace(plan, hosts=replace(plan.hosts, num_gpus=2), slots=replace(plan.slots, gathered=True)),
        )
    )
    assert two["d2h"] == one["d2h"] // 2
    assert one["h2d"] // 2 < two["h2d"] < one["h2d"]  # working copies are uploaded whole
    assert parts["h2d"] == one["h2d"] // 2


def test_shares_of_the_state(tmp_path: Path) -> None:
    recipe = Recipe(2, micro_batch_size=4, precision="bf16")
    _, plan = plan_for(folder_source(build_tiny(tmp_path / "model")).factory, recipe, Mode(), (4, 32))
    assert state_share(plan) == {"hbm": 0.0, "host": 1.0, "nvme": 0.0}
    layers = tuple(replace(layer, weights=Tier.HBM) for layer in plan.layers)
    assert state_share(replace(plan, layers=layers)) == pytest.approx({"hbm": 2 / 12, "host": 10 / 12, "nvme": 0.0})
