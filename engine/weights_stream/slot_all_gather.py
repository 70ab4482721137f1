"""Fills slots with an all-gather, where each rank uploads only its own part of a layer."""

from __future__ import annotations

import torch

from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.device.ranks import RankParts, Ranks
from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.virtual_clock import Op


class SlotGather:
    """Runs one all-gather for the trained elements of a layer and one for the frozen ones.

    Every rank loads the same layers in the same order, because all ranks have the same plan.
    """

    def __init__(
        self, layout: ModelLayout, itemsize: int, device: Device, ranks: Ranks, update_deadline_s: float
    ) -> None:
        """Create it for one rank.

        itemsize: bytes of an element of a working copy.
        update_deadline_s: of the plan.
        """
        self._parts = RankParts(layout, ranks.rank, ranks.size)
        self._itemsize = itemsize
        self._device = device
        self._ranks = ranks
        # Meanwhile other ranks may wait for a generation of their own, or for the disk of a save.
        self._timeout_s = STEP_DEADLINE_S + update_deadline_s

    def __call__(self, layer: int, flat: torch.Tensor, loaded: Event) -> Event:
        """Submit the all-gathers of a layer; return the event after which all of `flat` is there.

        flat: the layer, 1-D uint8. This rank's part is in it after `loaded`.
        """

        def work() -> None:
            for parts in self._parts.upload_spans_of_all(layer):
                if parts[-1].stop > parts[0].start:
                    self._ranks.all_gather(flat, [self._in_bytes(part) for part in parts])

        op = Op("all-gather", layer, num_bytes=flat.nbytes)
        return self._device.all_gather(work, op, loaded, self._timeout_s)

    def _in_bytes(self, part: Span) -> Span:
        return Span(part.start * self._itemsize, part.stop * self._itemsize)
