"""Lays out the flats of all layers one after the other (ModelLayout). flat_layout.py lays out each flat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from megatrain_ray.engine.layout.flat_layout import ElementRange, FlatLayout, starts_of

DIRECTION_BYTES = 2  # of an element of Muon's directions (orthogonalized momentum)
# Parts of hosts and of ranks are cut at multiples of this. If 64 × ranks divides a flat, all parts are equal.
PART_ELEMENTS = 64


class WeightPart(NamedTuple):
    """Part of a layer's working copy: `values` (1-D) from element `start` of the layer's flat on."""

    start: int
    values: torch.Tensor


class HostShare(NamedTuple):
    """Describes one host's share of a layer: a span of the trained part, one of the frozen part, and all wide copies.

    All are in padded coordinates of the layer. In the host's arena they lie one after the other. Of the wide copies a
    host fills only those of its trained span. They are few, and so every host needs equally much memory for them.
    """

    trained: ElementRange
    frozen: ElementRange
    wide: ElementRange

    @property
    def size(self) -> int:
        return sum(part.size for part in self)

    def position(self, padded: int) -> int:
        """Return where an element of the share (padded coordinate in the layer) lies, counted from its beginning."""
        if padded < self.frozen.start:
            return padded - self.trained.start
        if padded < self.wide.start:
            return self.trained.size + padded - self.frozen.start
        return self.trained.size + self.frozen.size + padded - self.wide.start


@dataclass(frozen=True)
class ModelLayout:
    """Describes all layers in the order of a forward, and where each starts in an arena that holds one after the other.

    If there are several hosts, each has a share of every layer, and arenas for that share.
    """

    layers: tuple[FlatLayout, ...]
    parameter_order: tuple[str, ...]  # as `model.parameters()`, tied ones once: order of the norm of norms
    # Elements of memory that all layers on the host share in turn (megatrain_ray/bench/aliased_memory.py); None: each
    # layer has its own memory.
    aliased_size: int | None = None
    host: int = 0
    num_hosts: int = 1

    def on_host(self, host: int, num_hosts: int) -> ModelLayout:
        return replace(self, host=host, num_hosts=num_hosts)

    @cached_property
    def shares(self) -> tuple[HostShare, ...]:
        return tuple(map(self._share, self.layers))

    def _share(self, layer: FlatLayout) -> HostShare:
        trained, frozen = (layer.cuts(part, self.num_hosts, PART_ELEMENTS)[self.host] for part in layer.parts)
        return HostShare(trained, frozen, layer.wide)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the first element of each layer in an arena of whole flats (each a multiple of CUT_ELEMENTS)."""
        return starts_of(layer.size for layer in self.layers)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    def starts_among(self, layers: Set[int] | None) -> tuple[int, ...]:
        """Return each layer's first element in an arena of this host's shares of some layers, in order.

        layers: the layers in the arena; None: all. The others take no room.
        """
        return starts_of(self._sizes_among(layers), self.aliased_size)

    def size_among(self, layers: Set[int] | None) -> int:
        size = sum(self._sizes_among(layers))
        return size if self.aliased_size is None else min(size, self.aliased_size)

    def first_among(self, layers: Set[int] | None) -> frozenset[int]:
        """Return the layers whose memory in that arena no earlier layer has; all of them unless memory is aliased."""
        ends = accumulate(self._sizes_among(layers))
        return frozenset(i for i, end in enumerate(ends) if self.aliased_size is None or end <= self.aliased_size)

    def _sizes_among(self, layers: Set[int] | None) -> list[int]:
        return [share.size if layers is None or i in layers else 0 for i, share in enumerate(self.shares)]

    @cached_property
    def trained_sizes(self) -> tuple[int, ...]:
        """Return the padded elements of each layer's gradient."""
        return tuple(layer.trained.size for layer in self.layers)

    @cached_property
    def host_trained_sizes(self) -> tuple[int, ...]:
        """Return the padded elements of this host's share of each layer's gradient."""
        return tuple(share.trained.size for share in self.shares)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """Return the layers of which something is trained."""
        return tuple(i for i, size in enumerate(self.trained_sizes) if size)

    @cached_property
    def with_muon(self) -> tuple[int, ...]:
        """Return the layers of which Muon trains something."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.num_muon)

    @cached_property
    def has_wide(self) -> bool:
        """Return whether the model reads some trained parameter in FP32 while the others stream as bf16."""
        return any(layer.wide_segments for layer in self.layers)

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        return tuple(i for i, size in enumerate(self.trained_sizes) if not size)

    def gradient_bytes(self, itemsize: int, staying: Set[int] = frozenset()) -> tuple[int, ...]:
        """Return the padded bytes of this host's share of each layer's gradient.

        itemsize: bytes of an element.
        staying: layers whose gradient stays where it was made; they count 0.
        """
        return tuple(size * itemsize if i not in staying else 0 for i, size in enumerate(self.host_trained_sizes))

    @property
    def direction_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each layer's Muon directions, which are bf16 at the coordinates of its gradient."""
        return tuple(layer.trained.size * DIRECTION_BYTES if layer.num_muon else 0 for layer in self.layers)

    @cached_property
    def trained_numels(self) -> frozenset[tuple[int, ...]]:
        """Return the element counts of each layer's trained segments. Layers with equal counts appear once."""
        return frozenset(tuple(segment.numel for segment in layer.trained_segments) for layer in self.layers)

    @cached_property
    def num_tied(self) -> int:
        """Return the number of elements of trained parameters that other parameters are tied to."""
        segments = (s for layer in self.layers for s in layer.segments if s.group.trained)
        return sum({s.tied_to: math.prod(s.shape) for s in segments if s.tied_to}.values())

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each layer, the layers whose weights it needs: itself and the owners of its tied parameters."""
        tied = ({self.owner[s.tied_to] for s in layer.segments if s.tied_to} for layer in self.layers)
        return tuple(tuple(sorted(owners | {i})) for i, owners in enumerate(tied))

    @property
    def lowest_trained(self) -> int:
        """Return the lowest layer with something to train. Backward ends there: no layer below needs a gradient."""
        return self.updated[0]

    @property
    def logical_size(self) -> int:
        return sum(layer.logical_size for layer in self.layers)

    @cached_property
    def owner(self) -> Mapping[str, int]:
        """Return the index of the layer that owns the elements of each parameter, by the parameter's name."""
        return {s.name: i for i, layer in enumerate(self.layers) for s in layer.owned}


def largest_share(layout: ModelLayout, num_hosts: int) -> ModelLayout:
    """Return the layout of the host with the largest share of every layer: the last one, because cuts round down."""
    return layout.on_host(num_hosts - 1, num_hosts)
