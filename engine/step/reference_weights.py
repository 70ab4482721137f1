"""Reads weights that are not the trained ones layer by layer, for a forward of a reference within a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.flat_layout import FlatLayout
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.schedule import Visit
from megatrain_ray.engine.shards.shard_state import fill, load_run
from megatrain_ray.engine.weights.weight_source import WeightSource


class ReferenceWeights:
    """Is a LayerSource that reads each layer from a WeightSource when a visit needs it.

    So of the whole reference there are never more than the layers of one visit in memory: once on the host and once on
    the device, both allocated here.
    """

    def __init__(
        self, device: Device, layout: ModelLayout, dtype: torch.dtype, weights: WeightSource, visits: Sequence[Visit],
        num_threads: int,
    ) -> None:  # fmt: skip
        """Allocate memory for the largest visit. Compute thread only.

        dtype: of working copies.
        num_threads: parameters that are read at the same time.
        """
        self._device = device
        self._layout = layout
        self._weights = weights
        self._visits = visits
        self._num_threads = num_threads
        self._host = torch.empty(largest_visit(layout), dtype=dtype)
        self.memory = torch.empty_like(self._host, device=device.torch_device)

    @contextmanager
    def layer(self, visit: int) -> Iterator[Mapping[FragmentId, torch.Tensor]]:
        start, regions = 0, dict[FragmentId, torch.Tensor]()
        for i in self._layout.sources[self._visits[visit].layer]:
            layer = self._layout.layers[i]
            flat, there = (memory[start : start + layer.size] for memory in (self._host, self.memory))
            fill_flat(layer, flat, self._weights, self._num_threads)
            there.copy_(flat)  # in the order of the compute stage, so after what reads the layers before it
            for f, span in enumerate(layer.fragments):
                regions[FragmentId(i, f)] = there[span.start : span.stop].view(torch.uint8)
            start += layer.size
        yield regions

    def sync_collective_order(self, visit: int) -> None:
        """Do nothing: no layer is gathered."""


def largest_visit(layout: ModelLayout) -> int:
    """Return how many elements the layers of a visit have at most."""
    return max(sum(layout.layers[i].size for i in sources) for sources in layout.sources)


def fill_flat(layer: FlatLayout, flat: torch.Tensor, weights: WeightSource, num_threads: int) -> None:
    """Fill a layer's flat, 1-D and padded, with working copies and wide copies. Raises ConfigError as load_run."""
    jobs = []
    for run in (run for part in layer.parts for run in layer.runs(part)):
        segment = run.segment
        values, wide = flat[segment.start : segment.stop], None
        if segment.wide_start is not None:
            wide = segment.read_view(flat).flatten()
        if segment.width > 1:
            values, wide = values.view(torch.float32), None
        jobs.append((run, partial(load_run, weights, run, values, None, wide)))
    fill(jobs, num_threads)
