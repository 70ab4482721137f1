"""Reward models: bit-equal to plain autograd, with the losses of TRL, whatever the micro-batches and the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.open_model import checked, read_model
from tests.engine.step.test_parity import assert_equal
from tests.support.families import FAMILIES, SIZES
from tests.support.family_models import NUM_IDS, build_family
from tests.support.pair_losses import Preference
from tests.support.pairs import Pair, margin_of, pair_batches, random_pairs
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny

REWARD = Preference("reward", center_rewards_coefficient=0.01)
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2)
# By RewardTrainer of TRL 1.16.0 (tests/support/make_trl_losses.py).
BY_TRL = [0.8002198, 0.7939497, 0.9450124, 0.8399288, 0.9307481, 0.6992968, 0.7322572, 0.755121, 0.6408626, 0.7599446]


def with_margins(count: int) -> Iterator[Pair]:
    return (pair._replace(margin=margin_of(number)) for number, pair in enumerate(random_pairs(count)))


@pytest.mark.parametrize(("precision", "micro_batch_size"), [("fp32", 2), ("bf16", 1)])
def test_it_is_bit_equal(tmp_path: Path, precision: str, micro_batch_size: int) -> None:
    build_tiny(tmp_path, reward=True)
    recipe = Recipe(3, precision=precision, preference=REWARD, micro_batch_size=micro_batch_size)
    batches = pair_batches(with_margins(12), 3, packing=precision == "fp32")
    ours = train_engine(tmp_path, batches, recipe, LAYERS)
    assert_equal(ours, train_reference(tmp_path, batches, recipe))
    metrics = ours.reports[0].metrics
    assert metrics["reward_margin"] == pytest.approx(metrics["reward_chosen"] - metrics["reward_rejected"], abs=1e-6)
    assert 0 <= metrics["reward_accuracy"] <= 1


def test_micro_batches_and_packing_change_nothing_but_rounding(tmp_path: Path) -> None:
    """Rows of 44 tokens: the last one of a row may end a document."""
    build_tiny(tmp_path, reward=True)
    recipe = Recipe(1, preference=REWARD)
    alone = pair_batches(with_margins(8), 1, packing=False, batch_size=8, seq_len=44)
    packed = pair_batches(with_margins(8), 1, packing=True, batch_size=4, seq_len=44)
    assert alone[0].num_documents == packed[0].num_documents == 16
    runs = [
        train_engine(tmp_path, batches, replace(recipe, micro_batch_size=size), Mode())
        for batches, size in ((alone, 1), (packed, 2), (packed, 4))
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-5)


def test_ten_steps_have_the_losses_of_trl(tmp_path: Path) -> None:
    build_tiny(tmp_path, reward=True)
    batches = pair_batches(with_margins(40), 10, packing=False)
    recipe = Recipe(10, lr=1e-3, schedule="constant", preference=REWARD)
    assert train_engine(tmp_path, batches, recipe, Mode()).losses == pytest.approx(BY_TRL, rel=1e-5)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["GPT-2", "Qwen3-Next", "Mixtral", "Gemma 3, vision-language"])
def test_a_model_of_texts_becomes_the_reward_model_that_transformers_makes(tmp_path: Path, name: str) -> None:
    texts = build_family(name, tmp_path / "texts")
    source = checked(read_model(ModelConfig(path=str(texts))).as_reward_model())
    theirs = AutoModelForSequenceClassification.from_pretrained(texts, num_labels=1, dtype=torch.float32)
    weights = source.weights()
    for key, parameter in theirs.named_parameters():
        ours = weights.read(key, 0, parameter.numel()).view(parameter.shape)
        if key == "score.weight":
            assert 0.01 < ours.std() < 0.03  # initializer_range is 0.02
            parameter.data = ours
        assert torch.equal(ours, parameter), key
    theirs.save_pretrained(tmp_path / "scores")
    pairs = (pair._replace(**{key: [3 + i % (NUM_IDS - 3) for i in getattr(pair, key)] for key in pair._fields[:3]})
             for pair in with_margins(8))  # fmt: skip
    batches = pair_batches(pairs, 2, packing=False, batch_size=2)
    recipe = Recipe(2, preference=REWARD, micro_batch_size=2)
    ours_trained = train_engine(tmp_path / "scores", batches, recipe, Mode())
    assert_equal(ours_trained, train_reference(tmp_path / "scores", batches, recipe, frozen=FAMILIES[name].frozen))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "glm4_moe", **SIZES}, "Transformers has no ForSequenceClassification class for a model of"),
        ({"model_type": "ctrl"}, "CTRLForSequenceClassification has more than a linear score after the body"),
        (
            {"model_type": "llama", **SIZES, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3},
            "LlamaForSequenceClassification has 3 labels, and a reward model has one",
        ),
    ],
)
def test_other_models_are_refused_by_name(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        checked(read_model(ModelConfig(config=config)).as_reward_model())
