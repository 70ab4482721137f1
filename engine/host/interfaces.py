"""Defines where the streaming engine gets weights from and where it sends gradients to.

An *update* has the number of the step whose gradients it consumes, from 1. Generation g of a layer's working copy is
what update g wrote; generation 0 is what the run started from. A layer of which nothing is trained has every
generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.layout.model_layout import WeightPart
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.residency import FragmentId

EVERY_GENERATION = 1 << 62  # larger than any generation that is reached


class HostWeights(NamedTuple):
    """Holds a fragment of a layer's working copy in host memory, or this rank's part of it."""

    parts: Sequence[WeightPart]  # one after another
    ready_at_s: float  # on the virtual clock


class MomentumPart(NamedTuple):
    """Holds the part of the requested moments that one shard keeps."""

    start: int  # first element, counted from the beginning of what was requested
    values: torch.Tensor  # 1-D fp32


@dataclass(frozen=True)
class Lease:
    """Represents a temporary hold on a part of the slab, for one layer's gradient or its Muon directions."""

    layer: int
    start_bytes: int  # where the layer's gradient or directions begin in the slab
    region: torch.Tensor  # 1-D uint8 view of the slab: all of the gradient or directions, or this rank's part
    free_at_s: float = 0.0  # on the virtual clock


class ParamSource(Protocol):
    def expect(self, fragments: Sequence[FragmentId], generation: int) -> None:
        """Announce the fragments that will be fetched, in this order. Those on disk are read ahead."""

    async def fetch(self, fragment: FragmentId, generation: int) -> HostWeights:
        """Wait until the layer has this generation, and return the fragment's weights.

        The tensors stay valid until the event passed to `release`, which is reached before the layer's next gradient
        lands.
        """

    def release(self, fragment: FragmentId, uploaded: Event) -> None:
        """Note that the fragment is not read after the event `uploaded`.

        Fragments are released in the order of `fetch`.
        """

    async def momentum(self, layer: int, generation: int) -> Sequence[MomentumPart]:
        """Wait until a layer that Muon trains has this generation, and return its first moments.

        They are those of this rank's part of the layer's gradient, and stay valid as long as the layer's weights.
        """


class Host(ParamSource, Protocol):
    """Is a source of weights and a sink of gradients."""

    async def lease(self, layer: int, update: int) -> Lease:
        """Wait for room in the slab for the layer's gradient of this update, and return the lease.

        With several ranks, the lease's region is this rank's part of the gradient.
        """

    async def lease_direction(self, layer: int, update: int) -> Lease:
        """Wait for room in the slab for the layer's directions, and return the lease, as `lease` does."""

    async def land(self, lease: Lease, update: int, at_s: float, direction: Lease | None = None) -> None:
        """Hand over a lease that holds the complete gradient. The sink owns the lease from now on.

        at_s: when the gradient was complete on the virtual clock.
        direction: lease that holds the complete directions, for a layer that Muon trains.
        """

    async def commit(self, params: UpdateParams, at_s: float) -> None:
        """Fix scale, learning rate and step of an update before its first write."""

    async def drain(self, generation: int) -> None:
        """Wait until every layer has this generation."""

    async def close(self) -> None:
        """Stop all background work. Idempotent."""
