"""The reference convicts the engine, so here it is convicted itself: against the plainest loop, and rule by rule."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatrain_ray.io.batching.batch import Batch
from tests.support.make_curves import CURVES, MODES, curve
from tests.support.reference import Named, Recipe, Result, train_reference
from tests.support.tiny import build_tiny, tiny_batches, weigh

RECIPE = Recipe(steps=10, lr=3e-3, warmup_steps=2)
CURVE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}  # relative: other processors and versions of torch round otherwise


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    variants: dict[str, dict[str, Any]] = {
        "untied": {},
        "tied": {"tied": True},
        "dropout": {"attention_dropout": 0.2},
    }
    return {name: build_tiny(root / name, **options) for name, options in variants.items()}


def plainest_loop(folder: Path, batches: list[Batch], recipe: Recipe) -> tuple[list[float], list[float], Named]:
    """Train as anybody would write it down first: one micro-batch, the model's own logits, its own parameters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
    losses, grad_norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        logits = model(input_ids=batch.input_ids).logits
        flat = logits.float().view(-1, logits.shape[-1]), batch.targets.view(-1)
        if batch.loss_weights is None:
            loss = F.cross_entropy(*flat, reduction="sum") / batch.num_supervised
        else:
            weights = batch.loss_weights.view(-1)
            loss = (F.cross_entropy(*flat, reduction="none") * weights).sum() / weights.double().sum().item()
        loss.backward()
        assert recipe.clip is not None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, foreach=False)
        optimizer.step()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    return losses, grad_norms, {name: p.detach() for name, p in model.named_parameters()}


def assert_equal(got: Named, expected: Named) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


def assert_same_run(got: Result, expected: Result) -> None:
    assert (got.step, got.adam_steps) == (expected.step, expected.adam_steps)
    assert_equal(got.masters, expected.masters)
    assert_equal(got.exp_avg, expected.exp_avg)
    assert_equal(got.exp_avg_sq, expected.exp_avg_sq)


@pytest.mark.parametrize("clip", [1.0, 100.0])
@pytest.mark.parametrize("variant", ["untied", "tied"])
def test_with_one_chunk_it_is_the_plainest_loop_bit_for_bit(
    folders: dict[str, Path], variant: str, clip: float
) -> None:
    """The loss is the mean over the tokens; that weighted by their loss weights in one of the cases."""
    recipe = Recipe(steps=6, lr=3e-3, schedule="constant", clip=clip, micro_batch_size=4)
    batches = [weigh(batch) if clip == 1.0 else batch for batch in tiny_batches(6)]
    got = train_reference(folders[variant], batches, recipe)
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.num_threads)
    losses, grad_norms, weights = plainest_loop(folders[variant], batches, recipe)
    torch.set_num_threads(before)
    assert got.losses == losses
    assert got.grad_norms == grad_norms
    assert_equal(got.masters, weights)
    assert [n > clip for n in got.grad_norms] == [clip == 1.0] * 6  # the one bites in every step, the other never


@pytest.mark.parametrize("chunk", [7, 32, 64])
@pytest.mark.parametrize("variant", ["untied", "tied"])
def test_chunks_and_micro_batches_change_last_bits_only(folders: dict[str, Path], variant: str, chunk: int) -> None:
    batches = tiny_batches(3)
    whole = train_reference(folders[variant], batches, replace(RECIPE, micro_batch_size=4))
    parts = train_reference(folders[variant], batches, replace(RECIPE, micro_batch_size=2, loss_chunk_tokens=chunk))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert parts.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
    assert any(not torch.equal(parts.masters[n], whole.masters[n]) for n in whole.masters)


def test_unsupervised_tokens_leave_the_divisor_and_weigh_the_same_in_any_split(folders: dict[str, Path]) -> None:
    (batch,) = tiny_batches(1)
    targets = batch.targets.clone()
    targets[0, 5:] = -100  # one micro-batch has 5 targets, three have 32: a mean of means would tell
    batch = replace(batch, targets=targets, num_supervised=5 + 3 * 32)
    whole = train_reference(folders["untied"], [batch], replace(RECIPE, micro_batch_size=4))
    parts = train_reference(folders["untied"], [batch], replace(RECIPE, micro_batch_size=1))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    logits = AutoModelForCausalLM.from_pretrained(folders["untied"])(input_ids=batch.input_ids).logits
    assert parts.losses[0] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-6)


@pytest.mark.parametrize("variant", ["tied", "dropout"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_continues_from_a_result_as_if_never_stopped(folders: dict[str, Path], variant: str, precision: str) -> None:
    recipe = replace(RECIPE, precision=precision)
    batches = tiny_batches(6)
    whole = train_reference(folders[variant], batches, recipe)
    first = train_reference(folders[variant], batches[:4], recipe)
    second = train_reference(folders[variant], batches[4:], recipe, start=first)
    assert first.losses + second.losses == whole.losses
    assert first.learning_rates + second.learning_rates == whole.learning_rates
    assert_same_run(second, whole)


def test_dropout_depends_on_the_seed_of_the_run_alone(folders: dict[str, Path]) -> None:
    batches = tiny_batches(2)
    runs = []
    for global_seed, seed in [(1, 0), (2, 0), (1, 1)]:
        torch.manual_seed(global_seed)
        runs.append(train_reference(folders["dropout"], batches, replace(RECIPE, seed=seed)).losses)
    without = train_reference(folders["untied"], batches, RECIPE).losses
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in [*runs, without]}) == 3


def test_dropout_differs_between_layers_micro_batches_and_steps(folders: dict[str, Path]) -> None:
    """Equal sequences in every micro-batch, at a learning rate of zero: only the dropout can differ."""
    (batch,) = tiny_batches(1, batch_size=1)
    one = train_reference(folders["dropout"], [batch] * 3, replace(RECIPE, lr=0.0, weight_decay=0.0)).losses
    assert len(set(one)) == 3
    parts = "input_ids", "targets", "real"
    twice = replace(batch, **{name: getattr(batch, name).repeat(2, 1) for name in parts})
    both = train_reference(folders["dropout"], [twice], replace(RECIPE, lr=0.0)).losses
    assert both[0] != one[0]


def test_bf16_keeps_fp32_masters_that_move_where_bf16_weights_could_not(folders: dict[str, Path]) -> None:
    recipe = replace(RECIPE, lr=1e-6, warmup_steps=0, schedule="constant", precision="bf16")
    name = "model.layers.1.mlp.up_proj.weight"
    before = train_reference(folders["untied"], [], recipe).masters[name]
    after = train_reference(folders["untied"], tiny_batches(1), recipe).masters[name]
    assert (after != before).float().mean() > 0.99
    assert (after.bfloat16() != before.bfloat16()).float().mean() < 0.05


def test_a_gradient_sum_is_rounded_once_where_bf16_is_asked_for(folders: dict[str, Path]) -> None:
    recipe = replace(RECIPE, precision="bf16", clip=None, betas=(0.0, 0.0), grad_dtype="bf16")
    result = train_reference(folders["untied"], tiny_batches(1), recipe)
    exact = train_reference(folders["untied"], tiny_batches(1), replace(recipe, grad_dtype="fp32"))
    for name, gradient in result.exp_avg.items():  # with these betas the first moment is the gradient
        assert torch.equal(gradient, exact.exp_avg[name].bfloat16().float())


def test_norms_and_biases_do_not_decay(folders: dict[str, Path]) -> None:
    batches = tiny_batches(1)
    none = train_reference(folders["tied"], batches, replace(RECIPE, weight_decay=0.0)).masters
    some = train_reference(folders["tied"], batches, replace(RECIPE, weight_decay=0.5)).masters
    assert {name for name in none if torch.equal(none[name], some[name])} == {n for n in none if "norm" in n}


def test_with_clipping_a_step_with_a_non_finite_norm_is_skipped(folders: dict[str, Path]) -> None:
    batches = tiny_batches(3)
    start = train_reference(folders["untied"], batches[:1], RECIPE)
    broken = dict(start.masters) | {"model.norm.weight": torch.full((64,), math.inf)}
    start = replace(start, masters=broken)
    after = train_reference(folders["untied"], batches[1:], RECIPE, start=start)
    assert after.skipped == [True, True]
    assert not any(map(math.isfinite, after.grad_norms))
    assert (after.step, after.adam_steps) == (3, 1)
    assert after.learning_rates == [3e-3, 3e-3]  # the schedule goes on
    assert_same_run(after, replace(start, step=3))


def test_the_number_of_threads_is_put_back(folders: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    train_reference(folders["untied"], [], replace(RECIPE, num_threads=before + 1))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("mode", MODES)
def test_the_committed_curves_are_met_within_tolerance(mode: str, tmp_path: Path) -> None:
    committed = json.loads((CURVES / f"{mode}.json").read_text())
    again = curve(MODES[mode], tmp_path)
    tolerance = CURVE_TOLERANCE[committed["recipe"]["precision"]]
    assert again["recipe"] == again["recipe"] | committed["recipe"], "a setting that came later has its default"
    assert again["losses"] == pytest.approx(committed["losses"], rel=tolerance)
    assert again["grad_norms"] == pytest.approx(committed["grad_norms"], rel=10 * tolerance)
    assert again["learning_rates"] == committed["learning_rates"]
    assert committed["losses"][-1] < committed["losses"][0] - 0.3
