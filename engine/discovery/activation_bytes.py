"""What a model's layers leave on the device between their forward and their backward, measured in a trial forward."""

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
    """What one micro-batch leaves on the device, per layer: the tensors that enter it, and what a kept graph saves
    beyond them and the weights. `masks`: the attention masks that all layers share. `compiled`: of each layer what a
    compiled one keeps; None where that was not asked for. `private`: whether nothing but the layer itself reads what
    enters it, from its forward to its backward; `replayable`: and the layer before makes all of it. `chunked`: the same
    where MLPs are computed in chunks, but for what a chunk takes; None where none can be, or that was not asked for.
    `whole`: of such, where they are not. `between`: of what is kept, what blocks that are divided save between the
    modules of a part, which no part computes again; none where they are not divided."""

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
        """Of one micro-batch as large as `count` of these; at most, since what does not grow is multiplied, too."""
        of_all = self.boundary, self.kept, self.between
        boundary, kept, between = (tuple(count * b for b in of_layers) for of_layers in of_all)
        compiled = tuple(trial and trial.times(count) for trial in self.compiled)
        chunked = self.chunked and self.chunked.times(count)
        counted = replace(self, boundary=boundary, kept=kept, between=between, masks=count * self.masks)
        return replace(counted, compiled=compiled, chunked=chunked)

    def above(self, lowest: int, other: ActivationBytes) -> ActivationBytes:
        """With the kept bytes of `other`; nothing waits for a backward below layer `lowest`."""
        zeros = (0,) * lowest
        chunked = self.chunked.above(lowest, other.chunked) if self.chunked and other.chunked else None
        boundary, kept = zeros + self.boundary[lowest:], zeros + other.kept[lowest:]
        between = zeros + other.between[lowest:] if self.between else ()
        return replace(self, boundary=boundary, kept=kept, between=between, chunked=chunked)

    def kept_when_recomputed(self, layer: int) -> int:
        """What waits for a backward of a layer that is not compiled though it computes its forward again."""
        return self.between[layer] if self.between else 0

    def in_chunks(self) -> ActivationBytes | None:
        """Of layers whose MLPs are computed in chunks, beside these; None where none can be."""
        return replace(self.chunked, whole=self) if self.chunked else None

    @property
    def trials(self) -> tuple[CompileTrial | None, ...]:
        """Of all layers; then those of layers in chunks, where some can be."""
        return self.compiled + (self.chunked.compiled if self.chunked else ())

    def with_trials(self, trials: tuple[CompileTrial | None, ...]) -> ActivationBytes:
        """With these `trials`."""
        count = len(self.kept)
        chunked = self.chunked and replace(self.chunked, compiled=trials[count:])
        return replace(self, compiled=trials[:count], chunked=chunked)

    def mlp_bytes(self, layer: int, *, compiled: bool) -> int:
        """What a layer's MLP would keep if it were computed whole; 0 where it is."""
        if self.whole is None:
            return 0
        if compiled:
            return max(0, self.whole.kept_at_most(layer) - self.kept_at_most(layer))
        return max(0, self.whole.kept[layer] - self.kept[layer])

    def budgets_of(self, layer: int) -> tuple[BudgetCost, ...]:
        """What each activation budget costs; none of a layer that is not compiled."""
        trial = self.compiled[layer] if self.compiled else None
        return trial.budgets if trial else ()

    def has_budget(self, layer: int, activation_budget: float) -> bool:
        """Whether a compiled layer can have it; no layer where nothing is compiled."""
        return bool(self.compiled) and activation_budget in self._kept_within[layer]

    def kept_within(self, layer: int, activation_budget: float) -> int:
        """Bytes that a compiled layer keeps."""
        return self._kept_within[layer][activation_budget]

    def kept_at_most(self, layer: int) -> int:
        """The same with the largest budget."""
        return self._kept_at_most[layer]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer the first one of which all this is the same, and what enters the layer behind it."""
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
    """For each value the place of the first one that is equal."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(value, i) for i, value in enumerate(values))


def activation_bytes_of(
    model: nn.Module, trial: Trial, structure: ModelStructure, attention: Attention, batch: tuple[int, int]
) -> ActivationBytes:
    """Of a trial of `batch` = [sequences, tokens]. What is frozen in the model keeps less."""
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
    """Of a structure with divided blocks. `whole`: right but for these."""
    boundary, kept, between = list(whole.boundary), list(whole.kept), [0] * len(whole.kept)
    for block in structure.blocks:
        parts = [structure.layers[i] for i in block]
        calls = [call for part in parts for path in part.modules if (call := trial.first(path)) is not None]
        given = storages_of(tensor for call in calls for tensor in call.inputs)
        for k, (i, layer) in enumerate(zip(block, parts, strict=True)):
            assert layer.part is not None  # all blocks are divided
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
    """Of a block whose MLP keeps its input only."""
    inner = trial.first(f"{call.path}.{mlp.path}")
    assert inner is not None  # or it had not been found
    (first, stop), (start, end) = call.saved, inner.saved
    saved = [*trial.saved[first:start], *trial.saved[end:stop], *inner.inputs]
    return _unique_bytes(saved, weights | storages_of(call.inputs))


def _unique_bytes(tensors: Sequence[torch.Tensor], without: set[int]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(num_bytes for key, num_bytes in storages.items() if key not in without)
