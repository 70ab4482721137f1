"""Reads weights by parameter name from the working copies of layers, for an export while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain_ray.engine.layout.expert_names import place_in_whole
from megatrain_ray.engine.layout.flat_layout import FlatLayout, Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.weights.export_save import whole
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype
from megatrain_ray.io.saves.manifest import ParameterEntry


class _Place(NamedTuple):
    """Locates elements [first, stop) of a whole parameter in a layer."""

    first: int
    stop: int
    layer: int
    segment: Segment


def entries_of(flat: FlatLayout) -> list[ParameterEntry]:
    """Return a layer's parameters as a manifest lists them: tied ones too, in logical coordinates."""
    entries, position = [], 0
    for segment in flat.segments:
        entries.append(ParameterEntry(segment.name, segment.shape, position, segment.tied_to, segment.fp32))
        position += segment.numel
    return entries


class WorkingValues:
    """Implements ExportValues and WeightSource for the values that the model computes with."""

    def __init__(self, layout: ModelLayout, precision: Precision, flat_of: Callable[[int], Tensor]) -> None:
        """Read from working copies of a layout of one host.

        flat_of: returns a layer's working copy on the host: 1-D, padded. Called again whenever another layer is read.
        """
        self.is_split = precision.is_split
        self._flat_of = flat_of
        self._last: tuple[int, Tensor] | None = None  # a layer and its working copy: only one is in memory at a time
        self._places: dict[str, list[_Place]] = {}
        for index, layer in enumerate(layout.layers):
            for segment in layer.owned:
                name, first = place_in_whole(segment.name, segment.shape)
                place = _Place(first, first + segment.numel, index, segment)
                self._places.setdefault(name, []).append(place)
        owned = (entry for layer in layout.layers for entry in entries_of(layer) if entry.tied_to is None)
        self.parameters: Sequence[ParameterEntry] = whole(owned)

    @property
    def dtype(self) -> ExportDtype:
        return ExportDtype.BF16 if self.is_split else ExportDtype.FP32

    def holds(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str, start: int, stop: int, dtype: ExportDtype = ExportDtype.FP32) -> Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D."""
        found = []
        for place in self._places[name]:
            first, last = max(start, place.first), min(stop, place.stop)
            if first < last:
                values = place.segment.read_view(self._flat(place.layer)).flatten()
                found.append(values[first - place.first : last - place.first])
        return (found[0] if len(found) == 1 else torch.cat(found)).to(dtype.torch)

    def _flat(self, layer: int) -> Tensor:
        if self._last is None or self._last[0] != layer:
            self._last = layer, self._flat_of(layer)
        return self._last[1]
