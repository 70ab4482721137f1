"""Ranks: the GPU workers of a run, one for each GPU. Each computes its own micro-batches of a step, and all of them
together make of it what one would have made: sums of gradients, norms, losses.

Each rank completes a part of every layer's gradient, its own, and hands that on to the host: a reduce-scatter; where
Muon trains something of the layer it is that with the matrices whose directions the rank makes.

`rank`: among the GPU workers of all hosts; `host_rank`: among those of its host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.model_layout import PART_ELEMENTS, ModelLayout
from megatrain_ray.engine.optimizer.matrix_parts import matrix_spans


class Ranks(Protocol):
    """This one among all. Every rank calls the same, in the same order; compute thread only. Each call raises
    LostPeerError where another rank does not do its part."""

    rank: int
    size: int

    def sum_part(self, flat: torch.Tensor, part: Span) -> None:
        """`part` of a 1-D tensor becomes the sum over all ranks. What is outside of it is worth nothing afterwards."""

    def sum(self, values: torch.Tensor) -> None:
        """Becomes the sum over all ranks, the same bits on each."""

    def all_gather(self, flat: torch.Tensor, parts: Sequence[Span]) -> None:
        """Fills the parts of a 1-D tensor that the other ranks have. `parts`: by rank. Of all calls this one alone may
        come from another thread; by order these are one line, and all others another one."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """1-D: those of all ranks, one after the other."""


class OneRank:
    """Of a run with one GPU: there is nothing to exchange."""

    rank, size = 0, 1

    def sum_part(self, flat: torch.Tensor, part: Span) -> None:
        pass

    def sum(self, values: torch.Tensor) -> None:
        pass

    def all_gather(self, flat: torch.Tensor, parts: Sequence[Span]) -> None:
        pass

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


class RankParts:
    """Which part of a layer a rank has: of its gradient, which it completes, and, where ranks upload parts, of its
    working copy. The ranks of a host divide the host's share; of layers that Muon trains something of, which is for one
    host alone, they divide the matrices. Spans in padded coordinates of the layer."""

    def __init__(self, layout: ModelLayout, rank: int = 0, size: int = 1) -> None:
        """`layout`: of any host. `rank`, `size`: among all hosts."""
        self._layout = layout
        self._rank = rank
        self._size = size
        self._parts: dict[int, tuple[tuple[Span, ...], tuple[Span, ...]]] = {}
        self._of_matrices = matrix_spans(layout, size)

    def gradient_span(self, layer: int) -> Span:
        """This rank's part of the gradient, which it completes and hands on; those of all ranks cover it. One that has
        no matrix of the layer has an empty one."""
        if layer in self._of_matrices:
            return self._of_matrices[layer][self._rank]
        return self.upload_spans_of_all(layer)[0][self._rank]

    def upload_spans(self, layer: int) -> tuple[Span, ...]:
        """Of the working copy: of what is trained, and of what is frozen, where it has some of it; an empty one where
        it has nothing, as of a layer that has fewer than 64 elements for each rank."""
        of_rank = [of_ranks[self._rank] for of_ranks in self.upload_spans_of_all(layer)]
        return tuple(span for span in of_rank if span.size) or (of_rank[0],)

    def upload_spans_of_all(self, layer: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Of every rank, by rank: its part of the working copy, of what is trained and of what is frozen. Gradients of
        layers without Muon are divided in the same way."""
        if layer not in self._parts:
            flat, num_hosts = self._layout.layers[layer], self._layout.num_hosts
            trained, frozen = (
                tuple(
                    part
                    for share in flat.cuts(whole, num_hosts, PART_ELEMENTS)
                    for part in flat.cuts(share, self._size // num_hosts, PART_ELEMENTS)
                )
                for whole in flat.parts
            )
            self._parts[layer] = trained, frozen
        return self._parts[layer]

    def views(self, layer: int, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Of the gradient's part, by parameter: whole parameters where there is one rank, else those elements, 1-D,
        that the part has of them. `flat`: 1-D, padded, of all that is trained."""
        if self._size == 1:
            return self._layout.layers[layer].trained_views(flat)
        runs = self._layout.layers[layer].runs(self.gradient_span(layer))
        return {run.segment.name: flat[run.padded : run.padded + run.length] for run in runs}
