"""Trains a tiny model of a type with the engine and with the reference, and says how the two compare."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.model.attention import PACKED, packed_arguments
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.model.architecture import Architecture, persistent_buffers
from megatrain_ray.model.open_model import open_model
from megatrain_ray.model.sight_check import check_packing
from tests.support.documents import packed, separate
from tests.support.family_models import family_batches
from tests.support.reference import Recipe, load_model, train_reference
from tests.support.run_engine import Mode, train_engine

STEPS = 3
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3)


# Where no documents share a row, Transformers 4 makes a whole mask, and the engine none: last bits differ.
MAKES_MASKS = transformers.__version__.startswith("4.")
OWN_NAMES = "own names"  # as save_pretrained writes them with save_original_format=False


@dataclass
class Verdict:
    """Says how a type fares. Each entry is `equal`, or the reason why not."""

    model_type: str
    fp32: str = ""
    bf16: str = ""
    packed: str = ""
    weights: str = ""  # OWN_NAMES: only such a folder is read
    masks: str = ""  # with Transformers 4: FP32 as it is, with whole masks; the others are without needless ones


def judge(model_type: str, settings: dict[str, Any], folder: Path) -> Verdict:
    """Build a tiny model of these settings in `folder`, and train it in FP32, in BF16, and packed."""
    verdict = Verdict(model_type)
    try:
        open_model(ModelConfig(config=settings))
        build(settings, folder)
        _check_loading(folder)
    except ConfigError as error:
        return refused(model_type, error)
    batches = family_batches(STEPS)
    recipe = Recipe(STEPS, micro_batch_size=2, seed=3)
    verdict.fp32 = compare(folder, batches, recipe, Mode())
    if "save_original_format=False" in verdict.fp32:
        verdict.weights = OWN_NAMES
        load_model(folder, torch.float32).save_pretrained(folder, save_original_format=False)
        verdict.fp32 = compare(folder, batches, recipe, Mode())
    verdict.bf16 = compare(folder, batches, replace(recipe, precision="bf16"), LAYERS)
    verdict.packed = verdict.fp32 if verdict.fp32 != "equal" else compare_packed(folder)
    if MAKES_MASKS and verdict.fp32 == "equal":
        verdict.masks = compare(folder, batches, recipe, Mode(), masks=True)
    return verdict


def refused(model_type: str, reason: object) -> Verdict:
    return Verdict(model_type, *[f"refused: {reason}"] * 3)


def build(settings: dict[str, Any], folder: Path) -> None:
    """Write a model with its own initialisation plus noise on every parameter and floating buffer of a checkpoint.

    Raises AssertionError if a buffer of an engine's model without a checkpoint is not what the model's own code makes.
    """
    torch.manual_seed(0)
    model = Architecture(settings)(torch.float32)
    empty = build_empty(Architecture(settings), torch.float32)
    own, here = dict(model.named_buffers()), dict(empty.named_buffers())
    differing = [name for name, buffer in own.items() if not torch.equal(buffer, here[name])]
    assert differing == [], f"buffers begin with other values: {differing}"
    if transformers.__version__.startswith("4."):
        model.init_weights()  # in Transformers 5 they have their values
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for buffer in persistent_buffers(model).values():
            if buffer.is_floating_point():
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if model.config.architectures is None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [type(model).__name__]}))


def _check_loading(folder: Path) -> None:
    """Raise ConfigError if Transformers does not read what it wrote: then there is nothing to compare with."""
    one, other = (dict(load_model(folder, torch.float32).named_parameters()) for _ in range(2))
    if drawn := [name for name, parameter in one.items() if not torch.equal(parameter, other[name])]:
        raise ConfigError(f"Transformers itself reads no {drawn[0]} from what it wrote")


def compare(folder: Path, batches: Sequence[Batch], recipe: Recipe, mode: Mode, *, masks: bool = False) -> str:
    """Return `equal` if losses, norms, masters and moments have the same bits as the reference's, else what differs.

    masks: whether the reference makes masks as its Transformers does, also where MAKES_MASKS needs none.
    """
    try:
        ours = train_engine(folder, batches, recipe, mode)
    except ConfigError as error:
        return f"refused: {error}"
    names = _reached(folder)
    reached = {next((n for n in several if n in ours.masters), several[0]): several[0] for several in names[True]}
    if wrong := reached.keys() ^ ours.masters.keys():
        return f"differs: trains {sorted(wrong & ours.masters.keys())}, not {sorted(wrong & reached.keys())}"
    unreached = tuple(several[0] for several in names[False])
    token = PACKED.set(None if masks or not MAKES_MASKS else batches[0].positions is not None)
    try:
        theirs = train_reference(folder, batches, recipe, frozen=unreached)
    finally:
        PACKED.reset(token)
    if ours.losses != theirs.losses:
        return f"differs: losses {ours.losses} for {theirs.losses}"
    if ours.grad_norms != theirs.grad_norms:
        return f"differs: norms {ours.grad_norms} for {theirs.grad_norms}"
    differing = [name for name, n in reached.items() if not torch.equal(ours.masters[name], theirs.masters[n])]
    differing += [name for name, n in reached.items() if not torch.equal(ours.exp_avg[name], theirs.exp_avg[n])]
    return f"differs: {', '.join(differing)}" if differing else "equal"


def _reached(folder: Path) -> dict[bool, list[list[str]]]:
    """Return the names of each parameter, by whether autograd gives it a gradient; the model's own name first.

    What the model's own code freezes has none. from_pretrained forgets that for RoFormer's positions. An expert in a
    list has one if another one of the list has, though it may get no token here.
    """
    model = load_model(folder, torch.float32).train()
    fresh = build_empty(Architecture(json.loads((folder / "config.json").read_text())), torch.float32)
    for name, parameter in fresh.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    model(input_ids=family_batches(1)[0].input_ids, use_cache=False).logits.sum().backward()
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    reached = {_of_experts(n[0]) for p, n in names.items() if p.grad is not None}
    return {have: [n for n in names.values() if (_of_experts(n[0]) in reached) == have] for have in (True, False)}


def _of_experts(name: str) -> str:
    return re.sub(r"experts\.\d+", "experts.*", name)


def compare_packed(folder: Path) -> str:
    """Return `equal` if a row of several documents trains as in the reference, and as the documents do apart."""
    try:
        check_packing(Architecture(json.loads((folder / "config.json").read_text())))
    except ConfigError as error:
        return f"refused: {error}"
    batches = [packed(step) for step in range(2)]
    arguments = packed_arguments(load_model(folder, torch.float32), batches[0].positions)
    has_axes = arguments["position_ids"].dim() == 3  # the reference gives no axes of positions
    verdict = "equal" if has_axes else compare(folder, batches, Recipe(2, seed=3), Mode())
    if verdict != "equal":
        return verdict
    loss, alone = (train_engine(folder, [make(0)], Recipe(1, seed=3), Mode()).losses[0] for make in (packed, separate))
    return "equal" if loss == pytest.approx(alone, rel=1e-5) else f"leaks: loss {loss} for {alone}"


def as_row(verdict: Verdict) -> dict[str, str]:
    return asdict(verdict)
