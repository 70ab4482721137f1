"""Where weights come from and gradients go: the seam between the streaming engine and whoever keeps the state.

An *update* is numbered like the step whose gradients it consumes, from 1. Generation g of a layer's working copy is
what update g wrote; generation 0 is what the run started from. A layer of which nothing is trained has every
generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.host.momenta import MomentumPart
from megatrain_ray.engine.layout.model_layout import WeightPart
from megatrain_ray.engine.optimizer.adamw import Rates
from megatrain_ray.engine.plan.residency import FragmentId

EVERY_GENERATION = 1 << 62  # larger than any


@dataclass(frozen=True)
class UpdateHeader:
    """What is fixed before the first write of an update. `update`: its number, from 1. `adam_step`: AdamW's own count,
    which skipped updates do not advance. `scale`: multiplies gradients, an FP32 value. `skip`: change nothing. `save`:
    a save wants the generation that this update makes; no layer may go beyond it before it is written or copied."""

    update: int
    adam_step: int
    lr: float
    scale: float
    skip: bool
    save: bool = False

    @property
    def rates(self) -> Rates:
        return Rates(torch.tensor(float(self.adam_step)), self.lr, self.scale)


class HostWeights(NamedTuple):
    """A fragment of a layer's working copy in host memory, part after part, or this rank's part of it; and when it
    became ready on the virtual clock."""

    parts: Sequence[WeightPart]
    ready_at_s: float


@dataclass(frozen=True)
class Lease:
    """A temporary hold on a part of the slab, for one layer's gradient or its directions, which begin at `start_bytes`:
    `region` is 1-D uint8 of the slab, all of them or this rank's part. `free_at_s`: from when on it was empty, on the
    virtual clock."""

    layer: int
    start_bytes: int
    region: torch.Tensor
    free_at_s: float = 0.0


class ParamSource(Protocol):
    def expect(self, fragments: Sequence[FragmentId], generation: int) -> None:
        """Fragments that will be fetched, one after the other: what is on disk is read ahead."""

    async def fetch(self, fragment: FragmentId, generation: int) -> HostWeights:
        """Waits for that generation of the layer. The tensors stay valid until the event of `release`, which is before
        the layer's next gradient lands."""

    def release(self, fragment: FragmentId, uploaded: Event) -> None:
        """What was fetched is not read after the event. Fragments are let go of in the order of `fetch`."""

    async def momentum(self, layer: int, generation: int) -> Sequence[MomentumPart]:
        """The first moments of that generation of a layer that Muon trains, of this rank's part of its gradient; valid
        as long as its weights are."""


class GradSink(Protocol):
    async def lease(self, layer: int, update: int) -> Lease:
        """Waits for room in the slab, for the gradient of this update; where there are several ranks, for this one's
        part of it."""

    async def lease_direction(self, layer: int, update: int) -> Lease:
        """The same for the layer's directions."""

    async def land(self, lease: Lease, update: int, at_s: float, direction: Lease | None = None) -> None:
        """The gradient is complete in the lease, which the sink now owns; so are the directions of a layer that Muon
        trains."""

    async def commit(self, header: UpdateHeader, at_s: float) -> None:
        """Fixes scale, learning rate and step of an update before its first write."""

    async def drain(self, generation: int) -> None:
        """Waits until every layer has this generation."""

    async def close(self) -> None:
        """Stops what works in the background. Idempotent."""


class Host(ParamSource, GradSink, Protocol):
    """Both directions."""
