"""Objectives over pairs: bit-equal to plain autograd, whatever the chunks, the micro-batches and what is in a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.objectives.pair_objective import PairObjective
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from tests.engine.step.test_parity import assert_equal
from tests.support.pair_losses import Preference
from tests.support.pairs import pair_batches, random_pairs, referenced
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny

STEPS = 3
# Losses of ten steps by TRL 1.16.0 (tests/support/make_trl_losses.py), and the most tokens of a prompt.
BY_TRL = {
    Preference("simpo", 2.0, 0.6): (
        4,
        [1.0852848, 0.9625702, 1.1438537, 1.0886195, 1.3559084, 0.9588081, 1.2081525, 0.9238607, 0.9051633, 1.1000573],
    ),
    Preference("orpo", 0.25): (
        1,
        [5.8389229, 5.9187343, 5.7885547, 5.6004933, 5.873106, 5.9035133, 5.8311203, 5.8141567, 6.0538042, 5.5216136],
    ),
    Preference("dpo", 0.5): (
        4,
        [0.8797712, 0.5836018, 0.7302655, 0.5879161, 0.7854398, 0.5919337, 0.6573416, 0.5127241, 0.5588504, 1.0430789],
    ),
    Preference("ipo", 0.5): (
        4,
        [1.2755449, 1.5757725, 1.0788222, 0.6244418, 1.6835614, 0.7243479, 0.8924134, 1.0419732, 0.8031592, 1.5472809],
    ),
    Preference("hinge", 0.5): (
        4,
        [1.2221255, 0.7824478, 0.9536604, 0.7968851, 1.1484895, 0.7633348, 0.8504359, 0.5519674, 0.7233366, 1.5023441],
    ),
    Preference("dpo", 0.5, sft_weight=0.3): (
        4,
        [2.5614491, 2.2914566, 2.4086089, 2.2697014, 2.5310894, 2.3254312, 2.3754175, 2.1679659, 2.2405042, 2.7402551],
    ),
}
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2)


@pytest.mark.parametrize(
    ("preference", "precision", "tied", "micro_batch_size"),
    [
        (Preference("simpo", 2.0, 0.6, 0.1, 0.3), "fp32", True, 2),
        (Preference("orpo", 0.25), "bf16", False, 1),
        (Preference("dpo", 0.5, label_smoothing=0.1, sft_weight=0.3), "fp32", True, 4),
        (Preference("ipo", 0.5), "bf16", False, 2),
        (Preference("hinge", 0.5), "fp32", False, 1),
    ],
)
def test_it_is_bit_equal(
    tmp_path: Path, preference: Preference, precision: str, tied: bool, micro_batch_size: int
) -> None:
    build_tiny(tmp_path, tied=tied)
    recipe = Recipe(STEPS, precision=precision, preference=preference, micro_batch_size=micro_batch_size)
    batches = pair_batches(random_pairs(12), STEPS, packing=precision == "fp32")
    batches = referenced(tmp_path / "reference", batches)
    ours = train_engine(tmp_path, batches, recipe, LAYERS)
    assert_equal(ours, train_reference(tmp_path, batches, recipe))
    metrics = ours.reports[0].metrics
    assert set(metrics) == {"reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"}
    assert metrics["reward_margin"] == pytest.approx(metrics["reward_chosen"] - metrics["reward_rejected"], abs=1e-6)
    assert metrics["reward_accuracy"] * (batches[0].num_documents or 0) / 2 == pytest.approx(
        round(metrics["reward_accuracy"] * (batches[0].num_documents or 0) / 2)
    )


def test_rewards_of_ipo_are_of_the_means_that_its_loss_compares() -> None:
    """Log-probabilities fell by 4 and by 6, of 2 and of 6 tokens: the chosen answer's fell more for each token."""
    sums, counts, reference = torch.tensor([[[-5.0, -7.0]], [[2.0, 6.0]], [[-1.0, -1.0]]])
    found = PairObjective("ipo", 0.5).of_pairs(sums, counts, reference)
    assert found.rewards.tolist() == [[-1.0, -0.5]]
    assert found.losses.tolist() == [4.0]


def test_a_certain_answer_has_finite_odds() -> None:
    """Of one log-probability is 0, of the other nearly so."""
    sums = torch.tensor([[0.0, -5.0], [-3.0, -1e-8]], requires_grad=True)
    losses = PairObjective("orpo").of_pairs(sums, torch.ones(2, 2)).losses
    losses.sum().backward()
    assert sums.grad is not None and bool(losses.isfinite().all() and sums.grad.isfinite().all())


def test_chunks_micro_batches_and_packing_change_nothing_but_rounding(tmp_path: Path) -> None:
    """A chunk of 7 tokens ends within answers, and rows with several pairs have the same pairs as rows with one."""
    build_tiny(tmp_path)
    recipe = Recipe(1, preference=Preference("simpo", 2.0))
    # All of the pairs are in one batch, of eight rows or of three and one without a pair less.
    alone = pair_batches(random_pairs(8), 1, packing=False, batch_size=8)
    packed = pair_batches(random_pairs(8), 1, packing=True, batch_size=4)
    assert alone[0].num_documents == packed[0].num_documents == 16
    runs = [
        train_engine(tmp_path, batches, replace(recipe, loss_chunk_tokens=chunk, micro_batch_size=size), Mode())
        for batches, chunk, size in ((alone, None, 1), (packed, None, 2), (packed, 7, 1), (packed, 7, 4))
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-5)


@pytest.mark.parametrize("preference", BY_TRL)
def test_ten_steps_have_the_losses_of_trl(tmp_path: Path, preference: Preference) -> None:
    """The same model, pairs, order, optimizer and schedule. Prompts have at most so many tokens."""
    most_prompt, theirs = BY_TRL[preference]
    build_tiny(tmp_path)
    batches = pair_batches(random_pairs(40, most_prompt), 10, packing=False)
    if preference.kind not in ("simpo", "orpo"):
        batches = referenced(tmp_path / "reference", batches)
    recipe = Recipe(10, lr=1e-3, schedule="constant", preference=preference)
    ours = train_engine(tmp_path, batches, recipe, Mode()).losses
    assert ours == pytest.approx(theirs, rel=1e-5)
