"""Discovers a model's structure with a trial forward, never by looking up names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.compile_trial import try_compiling
from megatrain_ray.engine.discovery.fake_answers import Answers
from megatrain_ray.engine.discovery.find_structure import StructureFinder
from megatrain_ray.engine.discovery.measure_activations import activation_bytes_of
from megatrain_ray.engine.discovery.outside_reads import check_outside_reads
from megatrain_ray.engine.discovery.trial_forward import Trial, run_trial, unique_bytes
from megatrain_ray.engine.layer_calls.imagined_images import (
    feature_bytes,
    images_at_every_token,
    num_trial_tokens,
    share_of_pads,
)
from megatrain_ray.engine.layout.flat_layout import ParameterGroup
from megatrain_ray.engine.model.attention import Attention, imagined_masks
from megatrain_ray.engine.model.images import GivenImages, answer_features
from megatrain_ray.engine.model.parameter_rules import ALL_ALIKE, ParameterRules, with_muon
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure
from megatrain_ray.errors import ConfigError


class TracedModel(NamedTuple):
    """Holds a model on fake tensors and its trial forward."""

    mode: FakeTensorMode  # created the tensors
    model: nn.Module
    groups: Mapping[str, ParameterGroup]  # by name, of each parameter
    trial: Trial
    num_image_tokens: int = 0  # that a vision tower got in the trial


class TrialSetup(NamedTuple):
    """Holds what a trial forward of a model depends on."""

    dtype: torch.dtype
    batch: tuple[int, int]  # sequences, and tokens of each
    attention: Attention
    packed: bool
    images: bool
    tower: bool
    # Whether all parameters need a gradient, and not only those that are trained. Then every output of a layer has a
    # graph, which distinguishes it from a mask.
    all_trained: bool = True


Trials = dict[TrialSetup, TracedModel]


def discover(
    factory: ModelFactory, dtype: torch.dtype, micro_batch_size: int, seq_len: int, rules: ParameterRules = ALL_ALIKE,
    *, attention: Attention = Attention.SDPA, packed: bool = False, compiled: bool = False, chunked: bool = False,
    block_parts: int = 1, images: bool = False, tower: bool = False, trials: Trials | None = None,
) -> tuple[ModelStructure, ActivationBytes]:  # fmt: skip
    """Discover a model's structure and the bytes of its activations.

    Runs a forward of [micro_batch_size, seq_len] ids on fake tensors; two forwards if something is frozen.

    packed: whether a row holds several documents.
    compiled: whether to measure compiled layers, too.
    chunked: whether to measure layers whose MLPs are computed in chunks, too.
    block_parts: largest number of parts into which a block is divided. Parts are neither compiled nor chunked.
    images: whether rows hold images. Then all tokens of the trial are those of images, which takes most memory.
    tower: whether steps run the vision tower and projector of such a model, in layers of their own.
    trials: earlier trial forwards of this model and these rules; what runs now is added.

    Raises ConfigError for a model whose layers are not each called once in order, or that cannot run, and for `rules`
    or `block_parts` that do not fit the model.
    """
    trials = {} if trials is None else trials
    setup = TrialSetup(dtype, (micro_batch_size, seq_len), attention, packed, images, tower)
    tried = _traced(factory, rules, setup, trials)
    model = tried.model
    with tried.mode, Answers():
        finder = StructureFinder(
            model, dtype, tried.trial, tried.groups, micro_batch_size, block_parts, tried.num_image_tokens
        )
        structure = finder.structure()
        structure = with_muon(structure, model) if rules.muon else structure
    if finder.readers:
        check_outside_reads(factory, structure, finder.readers)
    activations = _activation_bytes(tried, structure, setup)
    if structure.has_frozen:
        tried = _traced(factory, rules, setup._replace(all_trained=False), trials)
        activations = _with_frozen(activations, structure, _activation_bytes(tried, structure, setup))
    if images:
        num_bytes = feature_bytes(model.config, dtype, micro_batch_size * seq_len)
        activations = replace(activations, images=activations.images + num_bytes)
    if structure.is_divided or not chunked:
        activations = replace(activations, chunked=None)
    if compiled and not structure.is_divided:
        with imagined_masks(tried.model, attention, packed=packed):  # without it eager attention may run
            activations = _with_compiled(activations, structure, tried)
    return structure, activations


def _traced(factory: ModelFactory, rules: ParameterRules, setup: TrialSetup, trials: Trials) -> TracedModel:
    """Return the trial with this setup. Run it and add it to `trials` if it is not there."""
    if setup not in trials:
        trials[setup] = _run(factory, rules, setup)
    return trials[setup]


def _run(factory: ModelFactory, rules: ParameterRules, setup: TrialSetup) -> TracedModel:
    packed = setup.packed
    with FakeTensorMode() as mode, Answers():
        with _conversions():
            model = factory(setup.dtype)
        groups = rules.assign(model)  # before `requires_grad` is changed: what the model itself freezes stays frozen
        for name, parameter in model.named_parameters():
            trained = parameter.is_floating_point() if setup.all_trained else groups[name].trained
            parameter.requires_grad_(trained)
        model.train()
        ids = torch.zeros(setup.batch, dtype=torch.int64)
        positions = torch.zeros_like(ids) if packed else None
        try:
            images, num_image_tokens = None, 0
            if setup.images:
                images, num_image_tokens = _imagined_images(model, ids, positions, tower=setup.tower)
            with imagined_masks(model, setup.attention, packed=packed):
                trial = run_trial(model, ids, positions, images)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            hint = "; with data.packing: false it is given no positions" if packed else ""
            raise ConfigError(
                f"{type(model).__name__} cannot be traced: its forward on ids failed with {reason}{hint}"
            ) from error
    return TracedModel(mode, model, groups, trial, num_image_tokens)


def _imagined_images(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor | None, *, tower: bool
) -> tuple[GivenImages, int]:
    """Make the model take images. Return images at every token, and the tokens that the tower gets of them."""
    base = getattr(model, str(model.base_model_prefix))
    answer_features(base, trained=tower)
    count, dtype = num_trial_tokens(base, ids.numel()) if tower else 0, next(model.parameters()).dtype
    return images_at_every_token(base, ids, positions, dtype, trained=tower, num_tokens=count), count


def _activation_bytes(tried: TracedModel, structure: ModelStructure, setup: TrialSetup) -> ActivationBytes:
    """Return the bytes of a trial's activations; those in a vision tower as if it had got an image for every token.

    What else enters the tower's layers counts as images: pixels, rotary angles, and masks, which Mistral 3 has for all
    pairs of patches. Pads of images, which the trial lacks, take as much as patches.
    """
    with tried.mode, Answers():
        found = activation_bytes_of(tried.model, tried.trial, structure, setup.attention, setup.batch)
    vision_layers = [i for i, layer in enumerate(structure.layers) if layer.rows_per_token is not None]
    if not vision_layers:
        return found
    pads = share_of_pads(getattr(tried.model, str(tried.model.base_model_prefix)))
    factor = (1 + pads) * math.prod(setup.batch) / tried.num_image_tokens
    inputs = (t for i in vision_layers for path in structure.layers[i].modules for t in tried.trial.first[path].inputs)
    beside = unique_bytes(t for t in inputs if not t.requires_grad)
    return replace(found.scaled(vision_layers, factor), images=math.ceil(factor * beside))


def _with_frozen(activations: ActivationBytes, structure: ModelStructure, less: ActivationBytes) -> ActivationBytes:
    """Return `activations`, measured with all parameters trained, without what is kept for frozen parameters only.

    less: measured with these frozen.
    """
    # Below a projector, blocks of a frozen tower keep nothing, though they stand above a trained embedding.
    return activations.above(structure.lowest_trained, less).scaled(structure.without_backward, 0.0)


@contextmanager
def _conversions() -> Iterator[None]:
    """Let modules convert their parameters within the block, which torch does not do for fake tensors.

    DeepSeek-V4 converts some of its norms to FP32 when it builds them.
    """

    def apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else [self]:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
            module._buffers |= {name: b if b is None else function(b) for name, b in module._buffers.items()}
        return self

    before = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _with_compiled(activations: ActivationBytes, structure: ModelStructure, tried: TracedModel) -> ActivationBytes:
    """Return `activations` with those of compiled layers, and of compiled layers whose MLPs are computed in chunks."""
    with tried.mode:
        whole = try_compiling(tried.model, structure, tried.trial)
        activations = replace(activations, compiled=whole)
        if activations.chunked is None:
            return activations
        in_chunks = try_compiling(tried.model, structure, tried.trial, chunked=True)
    # A layer that cannot be compiled with its MLP whole is not compiled in chunks, either.
    pairs = zip(whole, in_chunks, strict=True)
    compiled = tuple(chunks if trial and trial.budgets else trial for trial, chunks in pairs)
    return replace(activations, chunked=replace(activations.chunked, compiled=compiled))
