"""Updates layers whose state is on disk, and passes it through slots in host memory.

SpillingShard is an AdamShard that keeps the state of some layers on disk, and with it the working copies of some of
these. Gradients of some layers may wait on disk for their update, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange, ParamRun
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.optimizer.torch_kernel import Job
from megatrain_ray.engine.plan.spill_layout import GRADIENT, WORKING, Extent
from megatrain_ray.engine.shards.adam_shard import AdamShard, Gradient
from megatrain_ray.engine.shards.shard_state import fill, load_run
from megatrain_ray.engine.spill.spill_ring import SpillRing
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.saves.save_writer import Buffer, Piece
from megatrain_ray.spans import Row


@dataclass(frozen=True)
class DiskRange:
    """Is a Buffer that refers to bytes [start, stop) of an extent. `SpillingShard.fetch` reads them."""

    extent: int  # its number
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> DiskRange:
        start, stop, _ = part.indices(len(self))
        return DiskRange(self.extent, self.start + start, self.start + stop)


class SpillingShard(AdamShard):
    """Keeps the state of some layers on disk, and gradients that wait there for their update (`store`).

    Only one caller at a time, except for `fetch`. Parameters that Muon trains do not spill, because the GPU worker
    reads their momenta.
    """

    def __init__(self, ring: SpillRing, *arguments: Any, **settings: Any) -> None:
        """Build an AdamShard from `arguments` and `settings`.

        ring: holds the layers in `layout.spilled`, and those whose gradients are stored. It is closed with the shard.
        """
        super().__init__(*arguments, **settings)
        self._ring = ring
        self._on_disk = ring.layout
        self._by_kind = {WORKING: self._working, **self._own}
        self.spans = ring.spans

    def load(self, source: WeightSource, num_threads: int = 1) -> None:
        super().load(source, num_threads)
        for layer in self._on_disk.layers:
            self._load_layer(source, layer, num_threads)

    def _load_layer(self, source: WeightSource, layer: int, num_threads: int) -> None:
        """Fill the state of a layer on disk from a source.

        Sources are fastest for whole parameters. So the residuals of the whole layer are read first, and the working
        copy if that is on disk too. There is memory for this: no gradient waits yet, and the slab takes at least as
        much.
        """
        span, whole = self.layout.spans[layer], {}
        if "residual" in self._own:
            whole["residual"] = torch.zeros(span.size, dtype=torch.int16)
        if layer in self.layout.on_disk:
            whole[WORKING] = torch.zeros(span.size, dtype=self._working.dtype)

        def job(run: ParamRun) -> Job:
            at = slice(run.padded - span.start, run.padded - span.start + run.length)
            of_run = {kind: tensor[at] for kind, tensor in whole.items()}
            working = of_run[WORKING] if WORKING in of_run else self._working_of(layer, run)
            return partial(load_run, source, run, working, of_run.get("residual"), self._wide_of(layer, run))

        fill([(run, job(run)) for run in self.layout.model.layers[layer].runs(span)], num_threads)
        for number in self._on_disk.state_of(layer):
            with self._blank(number) as (extent, state):
                for kind, tensor in state.items():
                    if kind in whole:
                        tensor.copy_(whole[kind][extent.span.start - span.start : extent.span.stop - span.start])
                    else:
                        tensor.zero_()

    def restorable(self) -> Iterator[list[Piece]]:
        in_memory = [i for i in range(len(self.layout.spans)) if i not in self._on_disk.layers]
        yield [piece for layer in in_memory for piece in self.pieces(layer)]
        for layer in in_memory:
            self.refresh_wide(layer)
        for layer in self._on_disk.layers:
            for number in self._on_disk.state_of(layer):
                with self._blank(number) as (extent, _):
                    yield [*self._pieces_of(layer, super()._buffers(layer, extent.span), extent.span)]
                    self.refresh_wide(layer, extent.span)
        yield [piece for layer in self._on_disk.layers for piece in self._frozen_pieces(layer)]

    def store(self, layer: int, gradient: Tensor) -> None:
        self._check_incoming(layer, "gradient", gradient, (self._on_disk.offload_dtype,))
        first = self.layout.model.shares[layer].trained.start
        for number in self._on_disk.gradients_of(layer):
            span = self._on_disk.extents[number].span
            part = gradient[span.start - first : span.stop - first]
            with self._waits(layer), self._ring.overwrite(number):
                self._copy(layer, [(self._ring.bytes_of(number)[GRADIENT], part.view(torch.uint8))])

    def _check_gradient(self, layer: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            super()._check_gradient(layer, gradient)

    def _update(
        self, layer: int, gradient: Gradient, params: UpdateParams, serial: int, within: ElementRange | None = None
    ) -> None:
        for of_part, part in self._gradient_parts(layer, gradient):
            for span in self._changing_extents(layer, part) if self._on_disk.state_of(layer) else (part,):
                super()._update(layer, of_part, params, serial, span)

    def _gradient_parts(self, layer: int, gradient: Gradient) -> Iterator[tuple[Gradient, ElementRange | None]]:
        """Yield the gradient of the whole layer and None; if it was stored, each part's gradient and span instead.

        A stored part is in memory until the next one is asked for.
        """
        if gradient.values is not None:
            yield gradient, None
            return
        for number in self._on_disk.gradients_of(layer):
            self._acquire(number)
            values, span = self._ring.bytes_of(number)[GRADIENT], self._on_disk.extents[number].span
            yield Gradient(values.view(self._on_disk.offload_dtype), start=span.start), span
            self._ring.release(number)

    def roll_back(self, layer: int, serial: int) -> None:
        """Roll back a layer, extent after extent if its state is on disk.

        Each extent is written to disk after that, because the update that follows may be one that is skipped.
        """
        if not self._on_disk.state_of(layer):
            super().roll_back(layer, serial)
        for span in self._changing_extents(layer):
            self._journal.roll_back(self.parts(layer, self.hyper, span), serial)

    def _changing_extents(self, layer: int, within: ElementRange | None = None) -> Iterator[ElementRange]:
        """Yield the span of each extent that begins in `within` (padded), while it is in memory and may be changed."""
        for number in self._on_disk.state_of(layer):
            span = self._on_disk.extents[number].span
            if within is None or within.start <= span.start < within.stop:
                self._acquire(number)
                self._ring.mark_dirty(number)
                yield span
                self._ring.release(number)

    def _copy_state(self, layer: int, copies: Mapping[str, Sequence[Tensor]]) -> None:
        """Fill copies with the layer's state, reading from disk what spills.

        The update that follows reads these extents again, except those that are still in slots.
        """
        if not self._on_disk.state_of(layer):
            super()._copy_state(layer, copies)
        left = {kind: iter(of_kind) for kind, of_kind in copies.items()}
        for number in self._on_disk.state_of(layer):
            self._acquire(number)
            tensors = self._kinds(layer, self._on_disk.extents[number].span)
            self._copy(layer, [(next(left[kind]), tensor) for kind in tensors for tensor in tensors[kind]])
            self._ring.release_unchanged(number)

    def fetch(self, part: Piece) -> Piece:
        return part._replace(buffers=[self._in_memory(buffer) for buffer in part.buffers])

    def _in_memory(self, buffer: Buffer) -> Buffer:
        if not isinstance(buffer, DiskRange):
            return buffer
        return self._ring.read(buffer.extent, ElementRange(buffer.start, buffer.stop))

    def close(self) -> None:
        super().close()
        self._ring.close()

    def _acquire(self, number: int) -> None:
        with self._waits(self._on_disk.extents[number].layer):
            self._ring.acquire(number)

    def _waits(self, layer: int) -> AbstractContextManager[None]:
        return self.spans.span(Row.UPDATES, "wait disk", layer, waits=True)

    @contextmanager
    def _blank(self, number: int) -> Iterator[tuple[Extent, Mapping[str, Tensor]]]:
        with self._ring.overwrite(number):
            yield self._on_disk.extents[number], self._in_slot(number)

    def _in_slot(self, number: int) -> dict[str, Tensor]:
        return {kind: in_slot.view(self._by_kind[kind].dtype) for kind, in_slot in self._ring.bytes_of(number).items()}

    def _buffers(self, layer: int, within: ElementRange | None = None) -> dict[str, list[Buffer]]:
        """Return the buffers of a layer's pieces. State on disk is read only when it is written to a save."""
        if not self._on_disk.state_of(layer):
            return super()._buffers(layer, within)
        runs = [*self._runs(layer)]
        if layer in self.layout.on_disk:
            working: list[Buffer] = [self._disk_range(layer, run, WORKING) for run in runs]
        else:
            working = [self._buffer(self._working_of(layer, run).view(torch.uint8)) for run in runs]
        own = {kind: list[Buffer](self._disk_range(layer, run, kind) for run in runs) for kind in self._own}
        return {self._working_kind: working, **own}

    def _disk_range(self, layer: int, run: ParamRun, kind: str) -> DiskRange:
        number = self._number(layer, run)
        extent, itemsize = self._on_disk.extents[number], self._by_kind[kind].itemsize
        start = extent.kinds[kind].start + (run.padded - extent.span.start) * itemsize
        return DiskRange(number, start, start + run.length * itemsize)

    def _runs(self, layer: int, within: ElementRange | None = None) -> Iterator[ParamRun]:
        """Yield the layer's runs. Those of a layer that spills are cut so that each lies in one extent."""
        numbers = self._on_disk.state_of(layer)
        if within or not numbers:
            yield from super()._runs(layer, within)
        else:
            for number in numbers:
                yield from super()._runs(layer, self._on_disk.extents[number].span)

    def _working_of(self, layer: int, run: ParamRun) -> Tensor:
        """Return a run's working copy. If it is on disk, its extent must be in a slot."""
        if layer not in self.layout.on_disk:
            return super()._working_of(layer, run)
        number = self._number(layer, run)
        first = run.padded - self._on_disk.extents[number].span.start
        return self._in_slot(number)[WORKING][first : first + run.length]

    def _own_around(self, layer: int, run: ParamRun) -> tuple[Mapping[str, Tensor], int]:
        if not self._on_disk.state_of(layer):
            return super()._own_around(layer, run)
        number = self._number(layer, run)
        return self._in_slot(number), self._on_disk.extents[number].span.start

    def _number(self, layer: int, run: ParamRun) -> int:
        numbers = self._on_disk.state_of(layer)
        return numbers[bisect_right(numbers, run.padded, key=lambda i: self._on_disk.extents[i].span.start) - 1]
