"""Ranks: the GPU workers of a run, one for each GPU. Each computes its own micro-batches of a step, and all of them
together make of it what one would have made: sums of gradients, norms, losses.

Each rank completes a part of every layer's gradient, its own, and hands that on to the host: a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.engine.layout import ModelLayout

PART_ELEMENTS = 64  # of what a rank's part is a multiple: parts of a flat that 64 × ranks divides are equally large


class Ranks(Protocol):
    """This one among all. Every rank calls the same, in the same order; compute thread only. Each call raises
    LostPeerError where another rank does not do its part."""

    rank: int
    size: int

    def sum_part(self, flat: torch.Tensor, part: Span) -> None:
        """`part` of a 1-D tensor becomes the sum over all ranks. What is outside of it is worth nothing afterwards."""

    def sum(self, values: torch.Tensor) -> None:
        """Becomes the sum over all ranks, the same bits on each."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """1-D: those of all ranks, one after the other."""


class OneRank:
    """Of a run with one GPU: there is nothing to exchange."""

    rank, size = 0, 1

    def sum_part(self, flat: torch.Tensor, part: Span) -> None:
        pass

    def sum(self, values: torch.Tensor) -> None:
        pass

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


class RankParts:
    """Which part of a layer's gradient a rank completes. Spans in padded coordinates of the layer."""

    def __init__(self, layout: ModelLayout, rank: int = 0, size: int = 1) -> None:
        self._layout = layout
        self._rank = rank
        self._size = size
        self._spans: dict[int, Span] = {}

    def span(self, layer: int) -> Span:
        """Of what is trained of the layer; the parts of all ranks cover it."""
        if layer not in self._spans:
            flat = self._layout.layers[layer]
            self._spans[layer] = flat.cuts(flat.trained, self._size, PART_ELEMENTS)[self._rank]
        return self._spans[layer]

    def views(self, layer: int, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Of the part, by parameter: whole parameters where there is one rank, else those elements, 1-D, that the part
        has of them. `flat`: 1-D, padded, of all that is trained."""
        if self._size == 1:
            return self._layout.layers[layer].trained_views(flat)
        runs = self._layout.layers[layer].runs(self.span(layer))
        return {run.segment.name: flat[run.padded : run.padded + run.length] for run in runs}
