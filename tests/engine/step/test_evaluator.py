"""Evaluation by the engine: the plain model's numbers, and nothing of the training changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model import chunked_loss as loss
from megatrain_ray.engine.model.chunked_loss import Targets
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder, Phase, Visit, forward_visits
from megatrain_ray.io.batching.batch import Batch
from tests.support.family_models import build_family, family_batches
from tests.support.held_out_loss import held_out_loss, plain_logprobs
from tests.support.reference import Recipe, load_model, torch_threads, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, text_batches, tiny_batches, weigh

LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3)
ON_DISK = Mode(num_shards=2, num_fragments=3, spilled=frozenset({1, 2, 3}), on_disk=frozenset({2, 3}))
OUTER = Mode(sums=Tier.HOST, activations=ActivationPolicy.RECOMPUTE)


def held_out() -> list[Batch]:
    """Return two batches, one with loss weights. The last has fewer rows than a step has, and one has no target."""
    whole, short = text_batches(2, 4, 32, seed=7)
    targets = torch.cat([short.targets[:1], torch.full((1, 32), -100)])
    return [weigh(whole), replace(short, input_ids=short.input_ids[:2], targets=targets, num_supervised=32)]


@pytest.mark.spread(4)  # each mode once, in either precision
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mode", "tied"), [(Mode(), False), (LAYERS, True), (OUTER, False), (ON_DISK, True)],
    ids=["plain", "layers", "sums on the host", "weights on disk"],
)  # fmt: skip
def test_it_is_the_plain_models_number_before_and_after_training(
    tmp_path: Path, mode: Mode, precision: str, tied: bool
) -> None:
    """The model has dropout: the engine's forward must leave it out, as the plain model's does."""
    build_tiny(tmp_path, tied=tied, attention_dropout=0.2)
    recipe = Recipe(3, precision=precision)
    ours = train_engine(tmp_path, tiny_batches(3), recipe, mode, held_out=held_out())
    assert ours.evaluations[0] == held_out_loss(tmp_path, held_out(), recipe)
    assert ours.evaluations[3] == held_out_loss(tmp_path, held_out(), recipe, ours.masters)
    assert len(set(ours.evaluations)) == 4
    assert torch.equal(ours.logprobs[0], plain_logprobs(tmp_path, held_out(), recipe))
    assert torch.equal(ours.logprobs[3], plain_logprobs(tmp_path, held_out(), recipe, ours.masters))


@pytest.mark.spread(3)  # each family once, in either precision
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Mixtral"])
def test_its_logits_are_those_of_the_model_that_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    seen: list[torch.Tensor] = []

    def watched(scores: torch.Tensor, targets: Targets, label_smoothing: float = 0.0) -> torch.Tensor:
        seen.append(scores.detach().clone())
        return cross_entropy(scores, targets, label_smoothing)

    cross_entropy = loss._cross_entropy
    monkeypatch.setattr(loss, "_cross_entropy", watched)
    build_family(name, tmp_path)
    *_, held = family_batches(2)
    recipe = Recipe(1, micro_batch_size=4, precision=precision)
    ours = train_engine(tmp_path, family_batches(1), recipe, LAYERS, held_out=[held])
    model = load_model(tmp_path, torch.bfloat16 if precision == "bf16" else torch.float32).eval()
    with torch_threads(recipe.num_threads), torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            master = ours.masters[parameter_name]
            parameter.data = to_working(master) if precision == "bf16" else master.clone()
        logits = model(held.input_ids, use_cache=False).logits.float()
    assert torch.equal(seen[-1].view_as(logits), logits)


@pytest.mark.parametrize("mode", [Mode(), LAYERS], ids=["plain", "layers"])
def test_training_does_not_notice_it(tmp_path: Path, mode: Mode) -> None:
    """Bit-equal to the reference, which evaluates nothing: dropout is on again, no random number was drawn."""
    build_tiny(tmp_path, attention_dropout=0.2)
    batches, recipe = tiny_batches(4), Recipe(4, seed=3)
    ours = train_engine(tmp_path, batches, recipe, mode, held_out=held_out())
    theirs = train_reference(tmp_path, batches, recipe)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    assert [name for name, master in theirs.masters.items() if not torch.equal(ours.masters[name], master)] == []


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2", "Mixtral", "Qwen3-Next", "Gemma 3n", "Gemma 3, vision-language"])
def test_families(tmp_path: Path, name: str) -> None:
    """Evaluations are right for families with something special.

    There is dropout everywhere, capped logits, routers whose auxiliary loss does not count, states, shared keys and
    values, and half of a model.
    """
    build_family(name, tmp_path)
    *_, held = family_batches(2)
    recipe = Recipe(1, micro_batch_size=2)
    ours = train_engine(tmp_path, family_batches(1), recipe, LAYERS, held_out=[held])
    assert ours.evaluations == [
        held_out_loss(tmp_path, [held], recipe),
        held_out_loss(tmp_path, [held], recipe, ours.masters),
    ]
    assert torch.equal(ours.logprobs[1], plain_logprobs(tmp_path, [held], recipe, ours.masters))


@pytest.mark.parametrize("chunk", [7, 32])
def test_chunks_change_last_bits_only(tmp_path: Path, chunk: int) -> None:
    """The stated bound: 1e-6 of the loss in FP32. Each chunk's logits are capped, as the model caps them."""
    build_family("Gemma 2", tmp_path)
    *_, held = family_batches(2)
    recipe = Recipe(1, loss_chunk_tokens=chunk, micro_batch_size=2)
    ours = train_engine(tmp_path, family_batches(1), recipe, Mode(), held_out=[held])
    assert ours.evaluations[0] == pytest.approx(held_out_loss(tmp_path, [held], recipe), rel=1e-6)
    assert ours.losses == pytest.approx(train_engine(tmp_path, family_batches(1), Recipe(1), Mode()).losses, rel=1e-6)


def test_the_reference_is_what_transformers_calls_the_loss(tmp_path: Path) -> None:
    build_tiny(tmp_path, attention_dropout=0.2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    (batch,) = tiny_batches(1)
    ids = torch.cat([batch.input_ids, batch.targets[:, -1:]], 1)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert held_out_loss(tmp_path, [batch], Recipe(1)) == pytest.approx(loss, rel=1e-6)


def test_a_forward_is_a_steps_without_its_backward() -> None:
    forward, head = Phase.FORWARD, Phase.HEAD
    assert forward_visits(3, 2, LoopOrder.LAYERS_OUTER) == (
        Visit(0, forward, 0, (0, 1), False), Visit(1, forward, 1, (0, 1), False), Visit(2, head, 2, (0, 1), False),
    )  # fmt: skip
    visits = forward_visits(2, 2, LoopOrder.MICRO_BATCHES_OUTER)
    assert [(visit.index, visit.phase, visit.layer, visit.micro_batches) for visit in visits] == [
        (0, forward, 0, (0,)), (1, head, 1, (0,)), (2, forward, 0, (1,)), (3, head, 1, (1,)),
    ]  # fmt: skip
