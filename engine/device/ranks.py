"""Exchanges gradients, norms and losses among ranks, the GPU workers of a run, one for each GPU.

Each rank computes its own micro-batches of a step. Together they compute what a single rank would have computed. Each
rank completes its own part of every layer's gradient with a reduce-scatter, and hands that part on to the host. If Muon
trains something of the layer, the part is the one with the matrices whose directions this rank computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.model_layout import PART_ELEMENTS, ModelLayout
from megatrain_ray.engine.optimizer.muon import matrix_spans


class Ranks(Protocol):
    """Represents this rank among all ranks.

    Every rank makes the same calls in the same order, on the compute thread only. Each call raises LostPeerError if
    another rank does not make its call.
    """

    rank: int  # among the GPU workers of all hosts
    size: int

    def sum_part(self, flat: torch.Tensor, part: ElementRange) -> None:
        """Replace `part` of the 1-D tensor `flat` with the sum over all ranks, and the rest with undefined values."""

    def sum(self, values: torch.Tensor) -> None:
        """Replace `values` with the sum over all ranks, which has the same bits on every rank."""

    def all_gather(self, flat: torch.Tensor, parts: Sequence[ElementRange]) -> None:
        """Fill the parts of the 1-D tensor `flat` that the other ranks hold.

        parts: the part of each rank, by rank.

        Only this call may come from another thread. All-gathers have an order of their own.
        """

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks as one 1-D tensor, concatenated by rank."""


class OneRank:
    rank, size = 0, 1

    def sum_part(self, flat: torch.Tensor, part: ElementRange) -> None:
        pass

    def sum(self, values: torch.Tensor) -> None:
        pass

    def all_gather(self, flat: torch.Tensor, parts: Sequence[ElementRange]) -> None:
        pass

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


class RankParts:
    """Divides each layer among ranks: its gradient, and its working copy where ranks upload only parts.

    The ranks of a host divide the host's share. Of a layer of which Muon trains something, they divide the matrices
    (Muon is for one host only). Spans are in padded coordinates of the layer.
    """

    def __init__(self, layout: ModelLayout, rank: int = 0, size: int = 1) -> None:
        """Divide `layout`, which is that of any host, for rank `rank` of `size` ranks of all hosts."""
        self._layout = layout
        self._rank = rank
        self._size = size
        self._parts: dict[int, tuple[tuple[ElementRange, ...], ...]] = {}
        self._of_matrices = matrix_spans(layout, size)

    def gradient_span(self, layer: int) -> ElementRange:
        """Return this rank's part of the layer's gradient, which it completes and hands on to the host.

        The parts of all ranks cover the gradient. Of a layer with matrices for Muon, a rank may have an empty part.
        """
        if layer in self._of_matrices:
            return self._of_matrices[layer][self._rank]
        return self.upload_spans_of_all(layer)[0][self._rank]

    def upload_spans(self, layer: int) -> tuple[ElementRange, ...]:
        """Return this rank's parts of the layer's working copy: trained, frozen and wide ones, without empty ones.

        If all are empty (a layer has fewer than 64 elements for each rank), return one empty span.
        """
        of_rank = [of_ranks[self._rank] for of_ranks in self.upload_spans_of_all(layer)]
        return tuple(span for span in of_rank if span.size) or (of_rank[0],)

    def upload_spans_of_all(self, layer: int) -> tuple[tuple[ElementRange, ...], ...]:
        """Return every rank's trained part of the layer's working copy, frozen part, and wide copies of the trained.

        Gradients of layers without Muon are divided in the same way.
        """
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
            self._parts[layer] = trained, frozen, tuple(map(flat.wide_of, trained))
        return self._parts[layer]

    def views(self, layer: int, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of the gradient as views by parameter name: 1-D, or whole parameters with one rank.

        flat: 1-D, padded, the gradient of all trained elements.
        """
        if self._size == 1:
            return self._layout.layers[layer].trained_views(flat)
        runs = self._layout.layers[layer].runs(self.gradient_span(layer))
        return {run.segment.name: flat[run.padded : run.padded + run.length] for run in runs}
