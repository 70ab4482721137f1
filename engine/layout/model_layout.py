"""ModelLayout: the flats of all layers, one after the other. What is inside one of them flat_layout.py says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from megatrain_ray.engine.layout.flat_layout import FlatLayout, Span, starts_of

DIRECTION_BYTES = 2  # of an element of what Muon orthogonalised
PART_ELEMENTS = 64  # of what a host's or a rank's part is a multiple: of a flat that 64 × ranks divides all are equal


class WeightPart(NamedTuple):
    """Of a working copy: `values` (1-D) from element `start` of the layer's flat on."""

    start: int
    values: torch.Tensor


class HostShare(NamedTuple):
    """What one host has of a layer, in padded coordinates of the layer: of what is trained, and of what is frozen. In
    its arena the one lies behind the other."""

    trained: Span
    frozen: Span

    @property
    def size(self) -> int:
        return self.trained.size + self.frozen.size

    def position(self, padded: int) -> int:
        """Where an element of the share is from its beginning on."""
        in_trained = padded - self.trained.start
        return in_trained if padded < self.frozen.start else self.trained.size + padded - self.frozen.start


@dataclass(frozen=True)
class ModelLayout:
    """All layers in the order of a forward, and where each starts in an arena that holds them one after the other. Of
    several hosts each has a share of every layer, and arenas for that."""

    layers: tuple[FlatLayout, ...]
    parameter_order: tuple[str, ...]  # of `model.parameters()`, tied ones once: the order of the norm of norms
    # Elements of memory that all layers on the host take in turn (megatrain_ray/bench/aliased_memory.py); None: each
    # has its own.
    aliased_size: int | None = None
    host: int = 0
    num_hosts: int = 1

    def on_host(self, host: int, num_hosts: int) -> ModelLayout:
        """As one of so many hosts has it."""
        return replace(self, host=host, num_hosts=num_hosts)

    @cached_property
    def shares(self) -> tuple[HostShare, ...]:
        """What this host has of each layer."""
        return tuple(
            HostShare(*(layer.cuts(part, self.num_hosts, PART_ELEMENTS)[self.host] for part in layer.parts))
            for layer in self.layers
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each layer in an arena of whole flats (each a multiple of CUT_ELEMENTS)."""
        return starts_of(layer.size for layer in self.layers)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    def starts_among(self, layers: Set[int] | None) -> tuple[int, ...]:
        """First element of each layer in an arena that holds what this host has of these alone (None: of all), one
        after the other."""
        return starts_of(self._sizes_among(layers), self.aliased_size)

    def size_among(self, layers: Set[int] | None) -> int:
        """Elements of that arena."""
        size = sum(self._sizes_among(layers))
        return size if self.aliased_size is None else min(size, self.aliased_size)

    def first_among(self, layers: Set[int] | None) -> frozenset[int]:
        """The layers whose place in that arena no earlier one has."""
        ends = accumulate(self._sizes_among(layers))
        return frozenset(i for i, end in enumerate(ends) if self.aliased_size is None or end <= self.aliased_size)

    def _sizes_among(self, layers: Set[int] | None) -> list[int]:
        return [share.size if layers is None or i in layers else 0 for i, share in enumerate(self.shares)]

    @cached_property
    def trained_sizes(self) -> tuple[int, ...]:
        """Padded elements of each layer's gradient."""
        return tuple(layer.trained.size for layer in self.layers)

    @cached_property
    def host_trained_sizes(self) -> tuple[int, ...]:
        """Of these what this host has."""
        return tuple(share.trained.size for share in self.shares)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """The layers of which something is trained, in the order of a forward."""
        return tuple(i for i, size in enumerate(self.trained_sizes) if size)

    @cached_property
    def with_muon(self) -> tuple[int, ...]:
        """The layers of which Muon trains something, in the order of a forward."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.num_muon)

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """The layers that no update changes."""
        return tuple(i for i, size in enumerate(self.trained_sizes) if not size)

    def gradient_bytes(self, itemsize: int, staying: Set[int] = frozenset()) -> tuple[int, ...]:
        """Of what this host has of each layer's gradient, padded; 0 where nothing is trained, or it stays where it was
        made. `itemsize`: bytes of an element."""
        return tuple(size * itemsize if i not in staying else 0 for i, size in enumerate(self.host_trained_sizes))

    @property
    def direction_bytes(self) -> tuple[int, ...]:
        """Of each layer's directions: bf16, at the coordinates of its gradient."""
        return tuple(layer.trained.size * DIRECTION_BYTES if layer.num_muon else 0 for layer in self.layers)

    @cached_property
    def trained_numels(self) -> frozenset[tuple[int, ...]]:
        """Elements of what is trained of each layer, segment by segment: layers that are alike once."""
        return frozenset(tuple(segment.numel for segment in layer.trained_segments) for layer in self.layers)

    @cached_property
    def num_tied(self) -> int:
        """Elements of trained parameters that others are tied to."""
        segments = (s for layer in self.layers for s in layer.segments if s.group.trained)
        return sum({s.tied_to: math.prod(s.shape) for s in segments if s.tied_to}.values())

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Of each layer those whose weights it needs: itself, and the owners of its tied parameters."""
        tied = ({self.owner[s.tied_to] for s in layer.segments if s.tied_to} for layer in self.layers)
        return tuple(tuple(sorted(owners | {i})) for i, owners in enumerate(tied))

    @property
    def lowest_trained(self) -> int:
        """No gradient goes below this layer: nothing there needs one."""
        return self.updated[0]

    @property
    def logical_size(self) -> int:
        return sum(layer.logical_size for layer in self.layers)

    @cached_property
    def owner(self) -> Mapping[str, int]:
        """Layer index that owns the elements of each parameter, by name."""
        return {s.name: i for i, layer in enumerate(self.layers) for s in layer.owned}


def largest_share(layout: ModelLayout, num_hosts: int) -> ModelLayout:
    """As that of the hosts has it which has the most of every layer: cuts round down, so the last one."""
    return layout.on_host(num_hosts - 1, num_hosts)
