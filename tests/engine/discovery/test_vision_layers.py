"""Finds the layers of a vision tower in a trial forward, and what images make of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.discovery.fake_answers import Answers
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.images import TOWER
from megatrain_ray.engine.model.parameter_rules import ParameterRules
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Candidate, Request
from megatrain_ray.model.architecture import Architecture
from tests.support.candidate_plans import build_plan
from tests.support.families import FAMILIES
from tests.support.pictured_models import PICTURED
from tests.support.run_engine import MACHINE


def found(name: str, seq_len: int, rules: Any = ParameterRules()) -> tuple[ModelStructure, ActivationBytes]:  # noqa: B008
    factory = Architecture(FAMILIES[name].config)
    return discover(factory, torch.float32, 1, seq_len, rules, images=True, tower=True)


def test_layers_of_a_tower_stand_between_embedding_and_blocks_in_the_order_of_their_calls() -> None:
    structure, activations = found("Qwen3-VL", 16, ParameterRules(freeze=(TOWER,)))
    tower = [layer for layer in structure.layers if layer.rows_per_token is not None]
    rows = [(layer.name, layer.rows_per_token) for layer in tower if layer.name != "vision.pos_embed"]
    assert rows == [
        ("vision.patch_embed", 4), ("vision.0", 4), ("vision.deepstack_merger_list_0", 1), ("vision.1", 4),
        ("vision.deepstack_merger_list_1", 1), ("vision.2", 4), ("vision.merger", 1),
    ]  # fmt: skip
    names = [layer.name for layer in structure.layers]
    assert names == ["embedding", *(layer.name for layer in tower), "layers.0", "layers.1", "layers.2", "head"]
    assert len(structure.blocks) == 3  # of the language model

    work = [layer for layer in work_of(structure) if layer.of_images]
    trained = [any(p.group.trained for p in layer.parameters) for layer in tower]
    assert [layer.has_backward for layer in work] == trained  # pixels have no gradient
    assert [num_bytes > 0 for num_bytes in activations.boundary[1 : len(tower) + 1]] == trained
    matrices = sum(math.prod(p.shape) for p in tower[-1].parameters if len(p.shape) > 1)
    assert work[-1].flops_of_token == 6 * matrices

    # The frozen layers have no backward, so nothing of theirs is among what leaves the device.
    request = Request(Precision.FP32, False, True, 1, 1, 16)
    candidate = Candidate(
        LoopOrder.LAYERS_OUTER, ActivationPolicy.KEEP, 2, 1, boundaries=Tier.HOST, kept=Tier.HOST, num_offloading=2
    )
    plan = build_plan(structure, activations, MACHINE, request, candidate)
    assert [layer.name for layer in plan.layers if layer.kept is Tier.HOST] == ["vision.merger", "layers.2"]
    assert [layer.name for layer in plan.layers if layer.boundary is Tier.HOST] == ["layers.0", "layers.1", "layers.2"]


def test_a_trial_with_a_part_of_the_images_counts_all() -> None:
    (_, small), (_, large) = (found("Qwen2.5-VL", seq_len) for seq_len in (1024, 2048))
    place = 2  # the first block of the tower
    assert large.kept[place] == 2 * small.kept[place] > 0
    assert large.boundary[place] == 2 * small.boundary[place] > 0
    assert large.images == 2 * small.images


def test_pads_of_images_take_as_much_as_patches() -> None:
    """Gemma 4's processor pads an image of 248 tokens to the patches of 280, 4 for each token here."""
    factory = Architecture(PICTURED["Gemma 4"].model)
    structure, activations = discover(factory, torch.float32, 1, 248, images=True, tower=True)
    place = next(i for i, layer in enumerate(structure.layers) if layer.name == "vision.0")
    assert structure.layers[place].rows_per_token == 4
    assert activations.boundary[place] == 280 * 4 * 32 * 4


def test_pixels_and_masks_of_all_patches_count_as_images() -> None:
    _, activations = found("Mistral 3, vision-language", 64)
    patches = 4 * 64
    angles, pixels, mask = 2 * patches * 32, patches * 3 * 14 * 14, patches * patches
    size = 2 * 8  # of the image, as integers
    places = 2 * 8 * patches  # with Transformers 5.17 each layer gets them, too
    assert activations.images - 4 * (64 * 32 + angles + pixels + mask) - size in (0, places)


def test_sizes_that_follow_from_known_values_are_true() -> None:
    with FakeTensorMode(), Answers():
        lengths = torch.tensor([2, 2, 3])
        assert torch.unique_consecutive(lengths).shape == (2,)
        assert torch.arange(7).split(lengths.tolist())[2].shape == (3,)
        assert torch.arange(4)[torch.arange(4) > 0].shape == (3,)
        unknown = torch.zeros(4, dtype=torch.int64)
        assert unknown[unknown > 0].shape == (4,)  # all of them, at most
