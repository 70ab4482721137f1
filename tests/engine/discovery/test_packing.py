"""Several documents in a row: none sees another, and losses are those of the same documents in rows of their own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import masking_utils

from megatrain_ray.engine.model.attention import PACKED, answer_packed, packed_arguments
from megatrain_ray.engine.model.micro_batch import micro_batches_of
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.model.sight_check import check_packing
from tests.support.documents import SEQ_LEN, packed, separate
from tests.support.families import FAMILIES, UNPACKED
from tests.support.family_models import build_family
from tests.support.reference import Recipe, load_model, train_reference
from tests.support.run_engine import Mode, train_engine

STEPS = 3


def why_not(name: str, folder: Path) -> str | None:
    """Return the reason why the model cannot keep documents apart, or None if it can."""
    try:
        check_packing(Architecture(json.loads((folder / "config.json").read_text())))
    except ConfigError as error:
        return str(error)
    return None


def loss_of(folder: Path, batch: Batch) -> float:
    """Return the loss of the unmodified model, without dropout, summed over supervised tokens."""
    model = load_model(folder, torch.float32).eval()
    packed = packed_arguments(model, batch.positions)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False, **packed).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").item()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_separate_or_is_refused(tmp_path: Path, name: str) -> None:
    build_family(name, tmp_path)
    reason = why_not(name, tmp_path)
    if reason is None:
        assert loss_of(tmp_path, packed(1)) == pytest.approx(loss_of(tmp_path, separate(1)), rel=1e-5)
    else:
        assert "set data.packing: false, which cuts each document alone" in reason
    assert (reason is not None) == (name in UNPACKED)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2"])
def test_the_engine_equals_the_reference(tmp_path: Path, name: str) -> None:
    build_family(name, tmp_path)
    batches = [packed(step) for step in range(STEPS)]
    recipe = Recipe(STEPS, seed=3)
    ours, theirs = train_engine(tmp_path, batches, recipe, Mode()), train_reference(tmp_path, batches, recipe)
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert [name for name, m in theirs.masters.items() if not torch.equal(ours.masters[name], m)] == []


def side_by_side(*batches: Batch) -> Batch:
    """Return the rows of all batches in one batch."""
    whole = torch.arange(SEQ_LEN)
    positions = [whole.expand_as(b.input_ids) if b.positions is None else b.positions for b in batches]
    ids, targets = torch.cat([b.input_ids for b in batches]), torch.cat([b.targets for b in batches])
    num_supervised = sum(b.num_supervised for b in batches)
    return Batch(ids, targets, torch.cat(positions), num_supervised, ids.numel(), ids.numel() * SEQ_LEN)


def test_documents_are_numbered_as_transformers_numbers_them() -> None:
    answer_packed()
    answer = masking_utils.find_packed_sequence_indices
    assert isinstance(answer, partial)
    (look_up,) = answer.args
    for micro_batch in micro_batches_of(side_by_side(packed(1), separate(1), packed(2)), 2):
        positions = micro_batch.positions
        expected = look_up(positions)
        assert micro_batch.is_packed == (expected is not None)
        token = PACKED.set(micro_batch.is_packed)
        found = answer(positions)
        PACKED.reset(token)
        assert (found is None and expected is None) or torch.equal(found, expected)


def test_no_forward_asks_the_device_what_the_host_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a forward would wait for the answer.

    Of four micro-batches that stand at a layer together some are packed.
    """
    build_family("Llama", tmp_path)
    answer_packed()
    (answer, (look_up,)) = (found := masking_utils.find_packed_sequence_indices).func, found.args
    asked: list[Tensor] = []

    def asking(positions: Tensor) -> Tensor | None:
        if not isinstance(positions, FakeTensor):  # of the plan's trial
            asked.append(positions)
        return look_up(positions)  # type: ignore[no-any-return]

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", partial(answer, asking))
    batches, recipe = [side_by_side(packed(1), separate(1)), separate(2)], Recipe(2, seed=3)
    ours = train_engine(tmp_path, batches[:1], recipe, Mode(order=LoopOrder.LAYERS_OUTER))
    train_engine(tmp_path, batches[1:], recipe, Mode())
    assert asked == []
    assert ours.losses == train_reference(tmp_path, batches[:1], recipe).losses
    assert asked != [], "the reference, whose forwards nobody answers for"
