"""Holds what a model's layers leave on the device between their forward and their backward."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain_ray.engine.discovery.compile_trial import BudgetCost, CompileTrial


@dataclass(frozen=True)
class ActivationBytes:
    """Holds the bytes that one micro-batch leaves on the device, layer by layer."""

    boundary: tuple[int, ...]  # tensors that enter the layer and require a gradient
    kept: tuple[int, ...]  # what a kept graph saves beyond the layer's inputs and weights
    masks: int = 0  # attention masks, which all layers share
    images: int = 0  # features of images, and what a tower that runs makes them of, if all tokens are those of images
    # What each layer keeps when it is compiled; None for a layer that is not. Empty if it was not asked for.
    compiled: tuple[CompileTrial | None, ...] = ()
    private: tuple[bool, ...] = ()  # whether only the layer reads its inputs, from its forward to its backward
    replayable: tuple[bool, ...] = ()  # whether the inputs are private, and the layer before makes all of them
    # The same if MLPs are computed in chunks, without the memory of one chunk. None if no MLP can be, or if it was not
    # asked for.
    chunked: ActivationBytes | None = None
    whole: ActivationBytes | None = None  # for bytes with chunked MLPs, the bytes with whole MLPs
    # The part of `kept` that divided blocks save between the modules of a part, which no part recomputes. Empty if
    # blocks are not divided.
    between: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash two of the fields: the search looks prices up by these bytes all the time."""
        return hash((self.boundary, self.kept))

    def times(self, count: int) -> ActivationBytes:
        """Return the bytes of one micro-batch as large as `count` of these.

        It is an upper bound, since constant amounts are multiplied, too.
        """
        of_all = self.boundary, self.kept, self.between
        boundary, kept, between = (tuple(count * b for b in of_layers) for of_layers in of_all)
        compiled = tuple(trial and trial.times(count) for trial in self.compiled)
        chunked = self.chunked and self.chunked.times(count)
        return replace(
            self, boundary=boundary, kept=kept, between=between, masks=count * self.masks, images=count * self.images,
            compiled=compiled, chunked=chunked,
        )  # fmt: skip

    def scaled(self, layers: Collection[int], factor: float) -> ActivationBytes:
        """Return the same with the bytes of some layers, which are not compiled, times a factor."""
        boundary, kept = (
            tuple(math.ceil(factor * b) if i in layers else b for i, b in enumerate(of_layers))
            for of_layers in (self.boundary, self.kept)
        )
        chunked = self.chunked and self.chunked.scaled(layers, factor)
        return replace(self, boundary=boundary, kept=kept, chunked=chunked)

    def above(self, lowest: int, other: ActivationBytes) -> ActivationBytes:
        """Return the same with the kept bytes of `other`, and zeros below layer `lowest`: they have no backward."""
        zeros = (0,) * lowest
        chunked = self.chunked.above(lowest, other.chunked) if self.chunked and other.chunked else None
        boundary, kept = zeros + self.boundary[lowest:], zeros + other.kept[lowest:]
        between = zeros + other.between[lowest:] if self.between else ()
        return replace(self, boundary=boundary, kept=kept, between=between, chunked=chunked)

    def kept_when_recomputed(self, layer: int) -> int:
        """Return the bytes kept for the backward of an uncompiled layer that recomputes its forward."""
        return self.between[layer] if self.between else 0

    def in_chunks(self) -> ActivationBytes | None:
        """Return the bytes with MLPs computed in chunks, with this object as their `whole`; None if no MLP can be."""
        return replace(self.chunked, whole=self, images=self.images) if self.chunked else None

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
        kept, of_whole = (b.kept_at_most(layer) if compiled else b.kept[layer] for b in (self, self.whole))
        return max(0, of_whole - kept)

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
        return max(self._kept_within[layer].values(), default=0)

    def backward_within(self, layer: int, activation_budget: float, chunk_bytes: int) -> int:
        """Return the most bytes that a compiled layer's backward holds with this budget, with what was kept.

        chunk_bytes: bytes that one chunk of the MLP's backward holds, if the MLP is computed in chunks.
        """
        (cost,) = (c for c in self.budgets_of(layer) if c.activation_budget == activation_budget)
        moments = (m.activation_bytes + m.weight_bytes + m.in_chunks * chunk_bytes for m in cost.backward)
        return max(moments, default=cost.kept_bytes)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Return for each layer the index of the first with the same bytes, and the same boundary after it."""
        following = (*self.boundary[1:], self.boundary[-1])
        budgets = map(self.budgets_of, range(len(self.kept)))
        of_whole = self.whole.alike if self.whole else (0,) * len(self.kept)
        return first_alike(zip(self.kept, self.boundary, following, budgets, of_whole, strict=True))

    @cached_property
    def _kept_within(self) -> tuple[dict[float, int], ...]:
        return tuple(
            {c.activation_budget: c.kept_bytes for c in trial.budgets} if trial else {} for trial in self.compiled
        )


def first_alike(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Return for each value the index of the first value that is equal to it."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(value, i) for i, value in enumerate(values))
