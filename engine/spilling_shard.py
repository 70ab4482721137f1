"""SpillingShard: an AdamShard of which the state of some layers is on disk and passes through slots in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.engine.load import WeightSource
from megatrain_ray.engine.shard import AdamShard, UpdateHeader
from megatrain_ray.engine.shard_state import fill
from megatrain_ray.engine.spill_ring import SpillRing
from megatrain_ray.io.pieces import Buffer, Piece
from megatrain_ray.spans import Row


@dataclass(frozen=True)
class SpilledBytes:
    """Bytes [start, stop) of a layer's extent: a Buffer that `SpillingShard.fetch` reads."""

    layer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> SpilledBytes:
        start, stop, _ = part.indices(len(self))
        return SpilledBytes(self.layer, self.start + start, self.start + stop)


class SpillingShard(AdamShard):
    """One caller at a time, but for `fetch`. What Muon trains does not spill: the GPU worker reads its momenta."""

    def __init__(self, ring: SpillRing, *arguments: Any, **settings: Any) -> None:
        """`ring`: of the layers in `layout.spilled`; closed with the shard. The rest is an AdamShard's."""
        super().__init__(*arguments, **settings)
        self._ring = ring
        self.spans = ring.spans

    def load(self, source: WeightSource, num_threads: int = 1) -> None:
        super().load(source, num_threads)
        for layer in self._ring.layers:
            with self._ring.blank(layer):
                fill(self._trained(source, layer), num_threads)

    def restorable(self) -> Iterator[list[Piece]]:
        in_memory = (i for i in range(len(self.layout.spans)) if i not in self._ring.extents)
        yield [piece for layer in in_memory for piece in self.pieces(layer)]
        for layer in self._ring.layers:
            with self._ring.blank(layer):
                yield [*self._pieces_of(layer, super()._buffers(layer)), *self._frozen_pieces(layer)]

    def update(
        self, layer: int, gradient: Tensor, header: UpdateHeader, serial: int, directions: Tensor | None = None
    ) -> None:
        if layer not in self._ring.extents:
            super().update(layer, gradient, header, serial, directions)
            return
        if header.skip:
            return
        self._bring(layer)
        self._ring.change(layer)
        super().update(layer, gradient, header, serial, directions)
        self._ring.leave(layer)

    def roll_back(self, layer: int, serial: int) -> None:
        if layer not in self._ring.extents:
            super().roll_back(layer, serial)
            return
        self._bring(layer)
        self._ring.change(layer)
        super().roll_back(layer, serial)
        self._ring.leave(layer)  # the update that follows may be one that is skipped

    def copy_layer(self, layer: int, memory: Tensor) -> list[Piece]:
        if layer not in self._ring.extents:
            return super().copy_layer(layer, memory)
        self._bring(layer)
        pieces = super().copy_layer(layer, memory)
        self._ring.pause(layer)
        return pieces

    def fetch(self, part: Piece) -> Piece:
        return part._replace(buffers=[self._read(x) if isinstance(x, SpilledBytes) else x for x in part.buffers])

    def close(self) -> None:
        super().close()
        self._ring.close()

    def _bring(self, layer: int) -> None:
        with self.spans.span(Row.UPDATES, "wait disk", layer, waits=True):
            self._ring.bring(layer)

    def _read(self, spilled: SpilledBytes) -> Buffer:
        return self._ring.read(spilled.layer, Span(spilled.start, spilled.stop))

    def _buffers(self, layer: int) -> dict[str, list[Buffer]]:
        """What is in no slot for good is read when it is written to a save."""
        if layer not in self._ring.extents:
            return super()._buffers(layer)
        runs, extent = list(self._runs(layer)), self._ring.extents[layer]
        working = (self._working_of(layer, run).view(torch.uint8) for run in runs)
        buffers: dict[str, list[Buffer]] = {self._working_kind: [*map(self._buffer, working)]}
        for kind, tensor in self._own.items():
            firsts = [run.padded - self.layout.spans[layer].start for run in runs]
            starts = [extent.kinds[kind].start + first * tensor.itemsize for first in firsts]
            sizes = [run.length * tensor.itemsize for run in runs]
            buffers[kind] = [SpilledBytes(layer, a, a + size) for a, size in zip(starts, sizes, strict=True)]
        return buffers if runs else {}

    def _own_of(self, layer: int) -> Mapping[str, Tensor]:
        if layer not in self._ring.extents:
            return super()._own_of(layer)
        in_slot = self._ring.state_of(layer)
        return {kind: in_slot[kind].view(tensor.dtype) for kind, tensor in self._own.items()}
