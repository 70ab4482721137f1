"""Measures in a trial forward what a model's layers leave on the device between their forward and their backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from megatrain_ray.engine.discovery.block_parts import glue_saved
from megatrain_ray.engine.discovery.compile_trial import BudgetCost, CompileTrial
from megatrain_ray.engine.discovery.private_inputs import entered, is_made_by, private_inputs, storages_of
from megatrain_ray.engine.discovery.trial_forward import Call, Trial
from megatrain_ray.engine.model.attention import Attention, mask_bytes
from megatrain_ray.engine.model.structure import LayerKind, Mlp, ModelStructure


@dataclass(frozen=True)
class ActivationBytes:
    """Holds the bytes that one micro-batch leaves on the device, layer by layer.

    boundary: tensors that enter the layer and require a gradient.
    kept: what a kept graph saves beyond the layer's inputs and weights.
    masks: attention masks, which all layers share.
    compiled: what each layer keeps when it is compiled; None for a layer that is not. Empty if it was not asked for.
    private: whether nothing but the layer itself reads its inputs, from its forward to its backward.
    replayable: whether the layer's inputs are private, and the layer before makes all of them.
    chunked: the same if MLPs are computed in chunks, without the memory of one chunk. None if no MLP can be chunked, or
        if it was not asked for.
    whole: for bytes with chunked MLPs, the bytes with whole MLPs; else None.
    between: the part of `kept` that divided blocks save between the modules of a part. No part recomputes it. Empty if
        blocks are not divided.
    """

    boundary: tuple[int, ...]
    kept: tuple[int, ...]
    masks: int = 0
    compiled: tuple[CompileTrial | None, ...] = ()
    private: tuple[bool, ...] = ()
    replayable: tuple[bool, ...] = ()
    chunked: ActivationBytes | None = None
    whole: ActivationBytes | None = None
    between: tuple[int, ...] = ()

    def times(self, count: int) -> ActivationBytes:
        """Return the bytes of one micro-batch as large as `count` of these.

        It is an upper bound, since constant amounts are multiplied, too.
        """
        of_all = self.boundary, self.kept, self.between
        boundary, kept, between = (tuple(count * b for b in of_layers) for of_layers in of_all)
        compiled = tuple(trial and trial.times(count) for trial in self.compiled)
        chunked = self.chunked and self.chunked.times(count)
        counted = replace(self, boundary=boundary, kept=kept, between=between, masks=count * self.masks)
        return replace(counted, compiled=compiled, chunked=chunked)

    def above(self, lowest: int, other: ActivationBytes) -> ActivationBytes:
        """Return the same with the kept bytes of `other`, and with zeros for all layers below `lowest`.

        Nothing waits for a backward below layer `lowest`.
        """
        zeros = (0,) * lowest
        chunked = self.chunked.above(lowest, other.chunked) if self.chunked and other.chunked else None
        boundary, kept = zeros + self.boundary[lowest:], zeros + other.kept[lowest:]
        between = zeros + other.between[lowest:] if self.between else ()
        return replace(self, boundary=boundary, kept=kept, between=between, chunked=chunked)

    def kept_when_recomputed(self, layer: int) -> int:
        """Return the bytes kept for the backward of an uncompiled layer that recomputes its forward."""
        return self.between[layer] if self.between else 0

    def in_chunks(self) -> ActivationBytes | None:
        """Return the bytes with MLPs computed in chunks, with this object as their `whole`.

        None if no MLP can be computed in chunks.
        """
        return replace(self.chunked, whole=self) if self.chunked else None

    @property
    def trials(self) -> tuple[CompileTrial | None, ...]:
        """Return the compile trials of all layers, followed by those of layers with chunked MLPs if there are any."""
        return self.compiled + (self.chunked.compiled if self.chunked else ())

    def with_trials(self, trials: tuple[CompileTrial | None, ...]) -> ActivationBytes:
        """Return the same with these compile trials, in the order of the property `trials`."""
        count = len(self.kept)
        chunked = self.chunked and replace(self.chunked, compiled=trials[count:])
        return replace(self, compiled=trials[:count], chunked=chunked)

    def mlp_bytes(self, layer: int, *, compiled: bool) -> int:
        """Return the additional bytes that a layer's MLP would keep if it were computed whole; 0 if it is."""
        if self.whole is None:
            return 0
        if compiled:
            return max(0, self.whole.kept_at_most(layer) - self.kept_at_most(layer))
        return max(0, self.whole.kept[layer] - self.kept[layer])

    def budgets_of(self, layer: int) -> tuple[BudgetCost, ...]:
        """Return the cost of each activation budget of the layer; empty for a layer that is not compiled."""
        trial = self.compiled[layer] if self.compiled else None
        return trial.budgets if trial else ()

    def has_budget(self, layer: int, activation_budget: float) -> bool:
        """Return whether the layer can be compiled with this budget; False if nothing is compiled."""
        return bool(self.compiled) and activation_budget in self._kept_within[layer]

    def kept_within(self, layer: int, activation_budget: float) -> int:
        """Return the bytes that a compiled layer keeps with this budget."""
        return self._kept_within[layer][activation_budget]

    def kept_at_most(self, layer: int) -> int:
        """Return the bytes that a compiled layer keeps with the largest budget."""
        return self._kept_at_most[layer]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Return for each layer the index of the first layer with the same bytes.

        The boundary of the layer after it is compared, too.
        """
        following = (*self.boundary[1:], self.boundary[-1])
        budgets = map(self.budgets_of, range(len(self.kept)))
        of_whole = self.whole.alike if self.whole else (0,) * len(self.kept)
        return first_alike(zip(self.kept, self.boundary, following, budgets, of_whole, strict=True))

    @cached_property
    def _kept_within(self) -> tuple[dict[float, int], ...]:
        return tuple(
            {c.activation_budget: c.kept_bytes for c in trial.budgets} if trial else {} for trial in self.compiled
        )

    @cached_property
    def _kept_at_most(self) -> tuple[int, ...]:
        return tuple(max(of_budgets.values(), default=0) for of_budgets in self._kept_within)


def first_alike(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Return for each value the index of the first value that is equal to it."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(value, i) for i, value in enumerate(values))


def activation_bytes_of(
    model: nn.Module, trial: Trial, structure: ModelStructure, attention: Attention, batch: tuple[int, int]
) -> ActivationBytes:
    """Measure the activation bytes in a trial forward of `batch` = [sequences, tokens].

    Parameters that are frozen in the model make layers keep less.
    """
    weights = storages_of(model.parameters())
    boundary, kept, in_chunks, of_blocks = [], [], [], list[torch.Tensor]()
    for layer in structure.layers:
        calls = [call for path in layer.modules if (call := trial.first(path)) is not None]
        entering = [t for t in calls[0].inputs if t.requires_grad]
        boundary.append(_unique_bytes(entering, set()))
        own = [call for call in calls if call.path not in structure.loss_modules]
        kept.append(sum(_kept(trial, call, weights) for call in own))
        of_norms = sum(_kept(trial, call, weights) for call in own if call.path in structure.norms)
        in_chunks.append(_kept_beside(trial, own[0], layer.mlp, weights) if layer.mlp else kept[-1] - of_norms)
        if layer.kind is LayerKind.BLOCK:
            of_blocks += calls[0].inputs
    masks = mask_bytes(attention, of_blocks, *batch)
    private = private_inputs(model, trial, structure)
    replayable = tuple(
        is_private and i > 0 and is_made_by(trial, structure.layers[i - 1], layer)
        for i, (is_private, layer) in enumerate(zip(private, structure.layers, strict=True))
    )
    whole = ActivationBytes(tuple(boundary), tuple(kept), masks, private=private, replayable=replayable)
    if structure.is_divided:
        return _with_parts(whole, trial, structure, weights)
    chunked = replace(whole, kept=tuple(in_chunks)) if any(layer.mlp for layer in structure.layers) else None
    return replace(whole, chunked=chunked)


def _with_parts(whole: ActivationBytes, trial: Trial, structure: ModelStructure, weights: set[int]) -> ActivationBytes:
    """Return `whole`, corrected for a structure with divided blocks.

    whole: bytes that are right except for divided blocks.
    """
    boundary, kept, between = list(whole.boundary), list(whole.kept), [0] * len(whole.kept)
    for block in structure.blocks:
        parts = [structure.layers[i] for i in block]
        calls = [call for part in parts for path in part.modules if (call := trial.first(path)) is not None]
        given = storages_of(tensor for call in calls for tensor in call.inputs)
        for k, (i, layer) in enumerate(zip(block, parts, strict=True)):
            assert layer.part is not None  # if one block is divided, all are
            boundary[i] = _unique_bytes(entered(trial, layer.part.leaving), set())
            between[i] = _unique_bytes(glue_saved(trial, parts, k), weights | given)
            kept[i] += between[i]
    replayable = (False,) * len(kept)
    return replace(
        whole, boundary=tuple(boundary), kept=tuple(kept), between=tuple(between), replayable=replayable, chunked=None
    )


def _kept(trial: Trial, call: Call, weights: set[int]) -> int:
    return _unique_bytes(trial.saved[slice(*call.saved)], weights | storages_of(call.inputs))


def _kept_beside(trial: Trial, call: Call, mlp: Mlp, weights: set[int]) -> int:
    """Return the bytes kept by a block whose MLP keeps only its input."""
    inner = trial.first(f"{call.path}.{mlp.path}")
    assert inner is not None  # find_mlp found it by its call
    (first, stop), (start, end) = call.saved, inner.saved
    saved = [*trial.saved[first:start], *trial.saved[end:stop], *inner.inputs]
    return _unique_bytes(saved, weights | storages_of(call.inputs))


def _unique_bytes(tensors: Sequence[torch.Tensor], without: set[int]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(num_bytes for key, num_bytes in storages.items() if key not in without)
