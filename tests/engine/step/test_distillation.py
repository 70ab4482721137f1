"""Distillation: bit-equal to plain autograd, and to TRL's losses, whatever the chunks and the micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatrain_ray.config.train_groups import DistillationConfig, OptimizationConfig
from megatrain_ray.engine.model.chunked_loss import Objective, Targets, chunk_sums, chunked_loss, top_records
from megatrain_ray.engine.objectives.distillation import Distillation, Softmax, TopLogprobs, TopTokens
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.planning.run_spec import objective_bytes
from tests.engine.step.test_parity import assert_equal
from tests.support.live_bytes import Live
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.teacher import Distil, gkd_losses, predictions, taught
from tests.support.tiny import VOCAB_SIZE, build_tiny, tiny_batches, weigh

STEPS = 3
# Losses of ten steps by TRL 1.16.0 (tests/support/make_trl_losses.py).
BY_TRL = {
    Distil(0.0, 1.0): [
        0.1806877, 0.1409166, 0.1212363, 0.1224362, 0.1039054, 0.0980049, 0.0752019, 0.089423, 0.0767234, 0.0568808,
    ],
    Distil(0.5, 1.0): [
        0.0436578, 0.0340911, 0.029368, 0.029588, 0.0253888, 0.0239796, 0.0185113, 0.0219266, 0.018849, 0.0140431,
    ],
    Distil(1.0, 1.0): [
        0.1846084, 0.1425301, 0.1220573, 0.1219852, 0.105032, 0.0993746, 0.0769846, 0.090665, 0.0776513, 0.0580018,
    ],
    Distil(0.5, 2.0): [
        0.0112364, 0.008786, 0.0075379, 0.0075542, 0.0064923, 0.0060876, 0.0047445, 0.0055494, 0.0047837, 0.003557,
    ],
}  # fmt: skip
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2)


@pytest.mark.parametrize(
    ("distil", "top_k", "precision", "tied"),
    [
        (Distil(0.0, 2.0), VOCAB_SIZE, "fp32", True),
        (Distil(0.5, 1.0, 0.3), VOCAB_SIZE, "bf16", False),
        (Distil(1.0, 2.0), 7, "fp32", False),
        (Distil(0.3, 1.0, 0.3), 7, "bf16", True),
    ],
)
def test_it_is_bit_equal(tmp_path: Path, distil: Distil, top_k: int, precision: str, tied: bool) -> None:
    """With the whole vocabulary the reference computes TRL's formula on whole logits."""
    build_tiny(tmp_path, tied=tied)
    recipe = Recipe(STEPS, precision=precision, distil=distil, micro_batch_size=2)
    weighted, *batches = tiny_batches(STEPS)
    masked = replace(batches[0], targets=batches[0].targets.masked_fill(torch.arange(32) < 9, -100), num_supervised=92)
    batches = taught(tmp_path / "teacher", [weigh(weighted), masked, *batches[1:]], top_k, distil.temperature)
    ours = train_engine(tmp_path, batches, recipe, LAYERS)
    assert_equal(ours, train_reference(tmp_path, batches, recipe))
    assert set(ours.reports[0].metrics) == {"cross_entropy"}


def test_chunks_and_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    batches = taught(tmp_path / "teacher", tiny_batches(1), 7)
    recipe = Recipe(1, distil=Distil(0.5))
    runs = [
        train_engine(tmp_path, batches, replace(recipe, loss_chunk_tokens=chunk, micro_batch_size=size), Mode())
        for chunk, size in ((None, 1), (7, 1), (7, 4))
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-5)


@pytest.mark.parametrize("distil", BY_TRL)
def test_ten_steps_have_the_losses_of_trl(tmp_path: Path, distil: Distil) -> None:
    """The same models, text, order, optimizer and schedule."""
    build_tiny(tmp_path)
    batches = taught(tmp_path / "teacher", tiny_batches(10), VOCAB_SIZE, distil.temperature)
    recipe = Recipe(10, lr=1e-3, schedule="constant", distil=distil)
    ours = train_engine(tmp_path, batches, recipe, Mode()).losses
    assert ours == pytest.approx(BY_TRL[distil], rel=1e-5)


@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
def test_a_chunk_takes_what_is_planned(sft_weight: float) -> None:
    num_tokens, vocab_size, top_k = 64, 8192, 16
    weight = torch.nn.Parameter(torch.randn(vocab_size, 8, dtype=torch.bfloat16))
    hidden = torch.randn(1, num_tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(top_k, dtype=torch.int32).expand(1, num_tokens, -1)
    teacher = TopLogprobs(ids, torch.randn(1, num_tokens, top_k + 1).log_softmax(-1))
    objective = Objective(distillation=Distillation(Softmax(2.0, vocab_size), 0.5, sft_weight))
    sums = partial(chunk_sums, lambda chunk: chunk @ weight.T, objective)
    targets = Targets(torch.zeros(1, num_tokens, dtype=torch.int64), teacher=teacher)
    with Live(weight, hidden) as live:
        before = live.most
        chunked_loss(sums, hidden, targets, [weight], chunk_tokens=num_tokens, total_weight=1.0)
    numbers = DistillationConfig(sft_weight=sft_weight)
    train = OptimizationConfig(objective="distill", distillation=numbers)
    planned = 2 * 2 + 8 + objective_bytes(train, vocab_size, compiled=False).per_logit
    assert live.most - before == pytest.approx(num_tokens * vocab_size * planned, rel=0.01)


def random_scores(num_tokens: int, seed: int) -> torch.Tensor:
    return 4 * torch.randn(num_tokens, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_what_is_recorded_are_the_teachers_probabilities() -> None:
    """Ids that only the teacher has are left out, and a position whose target does not count has zeros."""
    padded = torch.cat([random_scores(6, 0), torch.full((6, 3), 50.0)], 1)
    targets = torch.tensor([1, 2, -100, 3, 4, 5])
    for top_k in (7, VOCAB_SIZE):
        top = TopTokens(top_k, Softmax(2.0, VOCAB_SIZE))
        records = top_records(top, padded[None], Targets(targets))
        ids, logprobs = predictions(padded[:, :VOCAB_SIZE], targets, top_k, 2.0)
        assert records.shape == (6, 1 + top_k + top.num_logprobs)
        assert torch.equal(records[:, 1 : 1 + top_k].contiguous().view(torch.int32), ids)
        assert torch.allclose(records[:, 1 + top_k :], logprobs, rtol=1e-5, atol=1e-6)
        assert not records[2].any()
        of_target = F.cross_entropy(padded, targets, reduction="none", ignore_index=-100)
        assert torch.allclose(records[:, 0], -of_target)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_tokens_that_are_not_recorded_count_as_one(beta: float) -> None:
    """In double precision the divergence is that of the coarser distributions, and less than the whole one."""
    student, teacher = random_scores(5, 1), random_scores(5, 2)
    ids, logprobs = predictions(teacher, torch.zeros(5), 7, 1.0)
    found = Distillation(Softmax(1.0, VOCAB_SIZE), beta).divergences(student, TopLogprobs(ids, logprobs))
    p, q = (_coarse(scores, ids.long()) for scores in (teacher, student))
    mixture = beta * p + (1 - beta) * q
    expected = {0.0: _kl(p, q), 1.0: _kl(q, p)}.get(beta, beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture))
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    assert (found < gkd_losses(student, F.log_softmax(teacher, -1), Distil(beta))).all()


def _coarse(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    probabilities = scores.double().softmax(-1)
    return torch.cat([probabilities.gather(-1, ids), probabilities.scatter(-1, ids, 0.0).sum(-1, keepdim=True)], -1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum(-1)
