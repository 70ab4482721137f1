"""Which parameters a pattern means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.flat_layout import COMMON, FROZEN, ParameterGroup
from megatrain_ray.engine.model.parameter_rules import GroupRule, ParameterRules, decays
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.architecture import Architecture
from tests.support.families import FAMILIES

SLOW, FAST = ParameterGroup(lr_scale=0.1), ParameterGroup(lr_scale=3.0, weight_decay=0.0)


class Toy(nn.Module):
    """Parameters embed.weight, also known as head.weight, layers.0.up.weight … layers.10.down.weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(3, 3, bias=False), "down": nn.Linear(3, 3)}) for _ in range(11)
        )
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = self.embed.weight


def assigned(rules: ParameterRules, group: ParameterGroup = FROZEN) -> list[str]:
    """Names of the parameters that get the group."""
    return [name for name, got in rules.assign(Toy()).items() if got is group]


def test_nothing_said_means_everything_alike() -> None:
    assert set(ParameterRules().assign(Toy()).values()) == {COMMON}


def test_a_pattern_matches_anywhere_unless_it_is_anchored() -> None:
    assert assigned(ParameterRules(freeze=(r"layers\.1\.",))) == [
        "layers.1.up.weight", "layers.1.down.weight", "layers.1.down.bias",
    ]  # fmt: skip
    assert len(assigned(ParameterRules(freeze=("layers.1",)))) == 2 * 3, "layers 1 and 10: a dot is any character"
    assert assigned(ParameterRules(freeze=("^embed|bias$",)))[:2] == ["embed.weight", "head.weight"]


def test_trainable_leaves_the_rest_frozen_and_freeze_takes_from_it() -> None:
    rules = ParameterRules(trainable=(r"layers\.[89]\.", "head"), freeze=("bias",))
    left = assigned(rules, COMMON)
    assert left == [
        "embed.weight", "head.weight", *(f"layers.{i}.{n}.weight" for i in (8, 9) for n in ("up", "down")),
    ]  # fmt: skip


def test_the_first_group_that_matches_counts() -> None:
    rules = ParameterRules(groups=(GroupRule((r"\.up\.", "embed"), SLOW), GroupRule(("layers",), FAST)))
    groups = rules.assign(Toy())
    assert (groups["layers.3.up.weight"], groups["layers.3.down.bias"]) == (SLOW, FAST)
    assert groups["head.weight"] is groups["embed.weight"] is SLOW
    with pytest.raises(ConfigError, match=r"train\.groups\.1: every parameter that it matches is frozen or in an earl"):
        ParameterRules(groups=(GroupRule(("layers",), FAST), GroupRule((r"\.up\.",), SLOW))).assign(Toy())
    with pytest.raises(ConfigError, match=r"train\.groups\.0: every parameter"):
        ParameterRules(freeze=("up",), groups=(GroupRule(("up",), SLOW),)).assign(Toy())


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("emebd", "near it are embed"),
        (r"layers\.1\.upp", r"near it are .*layers\.1\.up"),
        ("^down.wieght$", "near it are down.weight"),
        ("xyz", "the first are embed.weight, layers.0.up.weight"),
    ],
)
def test_a_pattern_without_a_match_names_what_is_near(pattern: str, near: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"train\.freeze: .* matches no parameter of the model \(34 of them\); {near}"
    ):
        ParameterRules(freeze=(pattern,)).assign(Toy())


def test_what_the_model_froze_stays_so() -> None:
    model = Toy()
    model.layers[0].requires_grad_(False)
    groups = ParameterRules(trainable=("layers",)).assign(model)
    assert groups["layers.0.up.weight"] is FROZEN
    with pytest.raises(ConfigError, match="leave no parameter to train"):
        ParameterRules(trainable=(r"layers\.0\.",)).assign(model)


def test_neither_norms_nor_biases_decay_whatever_their_shape() -> None:
    """Cohere has a norm for each head, and GPT-OSS biases for each expert: matrices in shape only."""
    model = Toy()
    model.q_norm = nn.LayerNorm((4, 8))
    model.lm_head = type("NormHead", (nn.Linear,), {})(4, 8)  # Baichuan 2's: a matrix that it normalises
    model.experts = nn.ParameterDict({"up_proj": torch.zeros(4, 3, 2), "up_proj_bias": torch.zeros(4, 3)})
    left = [name for name, p in model.named_parameters() if p.dim() > 1 and not decays(model, name)]
    assert left == ["q_norm.weight", "q_norm.bias", "experts.up_proj_bias"]
    assert not decays(model, "layers.0.down.bias")


def test_parameters_that_a_text_never_reaches() -> None:
    """Freezing them is right, if vain; training nothing else is not."""
    factory = Architecture(dict(FAMILIES["Gemma 3, vision-language"].config))
    structure, _ = discover(factory, torch.float32, 1, 8, ParameterRules(freeze=("vision_tower",)))
    assert not structure.has_frozen
    with pytest.raises(ConfigError, match="a text reaches no parameter that is left to train"):
        discover(factory, torch.float32, 1, 8, ParameterRules(trainable=("vision_tower",)))
