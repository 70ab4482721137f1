"""KTO: bit-equal to plain autograd and like TRL's; how a step is divided into micro-batches does not change its KL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.step.test_pairs import LAYERS
from tests.engine.step.test_parity import assert_equal
from tests.support.kto_losses import Kto
from tests.support.pairs import labelled_batches, random_pairs, referenced
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny

# Losses of ten steps by TRL 1.16.0 (tests/support/make_kto_losses.py).
BY_TRL = {
    Kto("kto", 0.5, 1.2, 0.7): [
        0.3312145, 0.5256336, 0.4054922, 0.4014786, 0.3768177, 0.446835, 0.3130453, 0.5166455, 0.4983748, 0.4795235,
    ],
    Kto("apo_zero_unpaired", 0.5): [
        0.4731636, 0.4481789, 0.5139758, 0.4358041, 0.3731143, 0.4352175, 0.3653936, 0.4722649, 0.5247252, 0.4683764,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kto", "precision", "micro_batch_size"),
    [
        (Kto("kto", 0.5, 1.2, 0.7), "fp32", 2),
        (Kto("kto", 0.5), "bf16", 1),
    ],
)
def test_it_is_bit_equal(tmp_path: Path, kto: Kto, precision: str, micro_batch_size: int) -> None:
    build_tiny(tmp_path)
    recipe = Recipe(3, precision=precision, kto=kto, micro_batch_size=micro_batch_size)
    batches = labelled_batches(random_pairs(24), 3, packing=precision == "fp32")
    batches = referenced(tmp_path / "reference", batches)
    ours = train_engine(tmp_path, batches, recipe, LAYERS)
    assert_equal(ours, train_reference(tmp_path, batches, recipe))
    assert {name for report in ours.reports for name in report.metrics} == {
        "reward_margin", "reward_chosen", "reward_rejected", "kl",
    }  # fmt: skip
    assert max(report.metrics["kl"] for report in ours.reports) > 0.1


def test_chunks_and_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    recipe = Recipe(1, kto=Kto("kto", 0.5))
    alone = labelled_batches(random_pairs(8), 1, packing=False, batch_size=8)
    batches = referenced(tmp_path / "reference", alone)
    runs = [
        train_engine(tmp_path, batches, replace(recipe, loss_chunk_tokens=chunk, micro_batch_size=size), Mode())
        for chunk, size in ((None, 8), (None, 1), (7, 4))
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-5)
        assert run.reports[0].metrics == pytest.approx(runs[0].reports[0].metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kto", BY_TRL)
def test_ten_steps_have_the_losses_of_trl(tmp_path: Path, kto: Kto) -> None:
    """The same model, answers, order, optimizer and schedule."""
    build_tiny(tmp_path)
    batches = referenced(tmp_path / "reference", labelled_batches(random_pairs(40), 10, packing=False))
    recipe = Recipe(10, lr=1e-3, schedule="constant", kto=kto)
    assert train_engine(tmp_path, batches, recipe, Mode()).losses == pytest.approx(BY_TRL[kto], rel=1e-5)
