"""Z-loss and label smoothing: bit-equal to the reference, equal to their definitions, and off by default."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatrain_ray.engine.model.chunked_loss import Objective, Targets
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from tests.engine.step.test_parity import assert_equal
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches, weigh

STEPS = 3
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2)
# Weight of the z-loss, label smoothing, and whether tokens have loss weights.
TERMS = [(0.02, 0.0, False), (0.0, 0.1, True), (0.02, 0.1, True)]


@pytest.mark.spread(5)
@pytest.mark.parametrize(("z_loss", "label_smoothing", "weighted"), TERMS)
@pytest.mark.parametrize(
    ("precision", "chunk", "tied"), [("fp32", None, False), ("fp32", 12, True), ("bf16", 12, True)]
)
def test_it_is_bit_equal(
    tmp_path: Path, z_loss: float, label_smoothing: float, weighted: bool, precision: str, chunk: int | None, tied: bool
) -> None:
    """Unsupervised targets in one micro-batch; the plain cross-entropy is that of a training without terms."""
    build_tiny(tmp_path, tied=tied)
    batches = tiny_batches(STEPS)
    for batch in batches:
        batch.targets[1, :9] = -100
    batches = [replace(batch, num_supervised=batch.num_supervised - 9) for batch in batches]
    batches = list(map(weigh, batches)) if weighted else batches
    plain = Recipe(STEPS, precision=precision, loss_chunk_tokens=chunk)
    recipe = replace(plain, z_loss=z_loss, label_smoothing=label_smoothing)
    ours, theirs = train_engine(tmp_path, batches, recipe, LAYERS), train_reference(tmp_path, batches, recipe)
    assert_equal(ours, theirs)
    without = train_reference(tmp_path, batches[:1], plain)
    assert ours.reports[0].metrics["cross_entropy"] == without.losses[0] != theirs.losses[0]
    assert without.grad_norms[0] != theirs.grad_norms[0]


def test_side_outputs_are_no_cross_entropy(tmp_path: Path) -> None:
    """A router's auxiliary loss is a term as well; the same number as with other terms."""
    build_family("Mixtral", tmp_path)
    recipe = Recipe(1, micro_batch_size=2)
    plain, smoothed = (
        train_engine(tmp_path, family_batches(1), of, Mode()).reports[0]
        for of in (recipe, replace(recipe, z_loss=0.02, label_smoothing=0.1))
    )
    assert plain.loss - plain.metrics["cross_entropy"] == pytest.approx(
        0.1 * 2.0, rel=0.2
    )  # the coefficient, balanced experts
    assert plain.metrics["cross_entropy"] == smoothed.metrics["cross_entropy"]


def test_without_terms_there_is_one_number(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    assert train_engine(tmp_path, tiny_batches(1), Recipe(1), Mode()).reports[0].metrics == {}


def test_the_definitions() -> None:
    """Written out in double: (1 - e) ce + e / V sum(-log p) + z log(Z)^2, over supervised tokens."""
    generator = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(1, 9, 11, generator=generator)
    targets = torch.tensor([3, -100, 0, 10, -100, 7, 7, 1, -100])
    log_p = scores[0].double().log_softmax(-1)
    for z_loss, smoothing in itertools.product((0.0, 0.3), (0.0, 0.2)):
        expected = plain = 0.0
        for row, target in zip(log_p.tolist(), targets.tolist(), strict=True):
            if target >= 0:
                plain -= row[target]
                expected += -(1 - smoothing) * row[target] - smoothing / 11 * sum(row)
        log_z = scores[0].double().logsumexp(-1)[targets >= 0]
        expected += z_loss * float((log_z**2).sum())
        total, cross_entropy = Objective(z_loss, smoothing).sums(scores, Targets(targets))
        assert total.item() == pytest.approx(expected, rel=1e-6)
        assert cross_entropy.item() == pytest.approx(plain, rel=1e-6)
        assert torch.equal(cross_entropy, F.cross_entropy(scores[0], targets, reduction="sum"))
