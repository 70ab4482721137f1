"""AdamShard: the optimizer of a contiguous span of every layer. A plain class; actors only forward to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain_ray.engine.adamw import AdamState, Hyper, Rates, Scratch, adamw_block, blocks
from megatrain_ray.engine.block_pool import BlockPool, Job
from megatrain_ray.engine.layout import Run, ShardLayout, Span
from megatrain_ray.engine.load import WeightSource
from megatrain_ray.engine.plan import Precision
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.save import Piece

LOAD_ELEMENTS = 16 << 20  # 64 MiB of FP32


@dataclass(frozen=True)
class UpdateHeader:
    """What is fixed before the first write of an update. `update`: its number, from 1. `adam_step`: AdamW's own count,
    which skipped updates do not advance. `scale`: multiplies gradients, an FP32 value. `skip`: change nothing."""

    update: int
    adam_step: int
    lr: float
    scale: float
    skip: bool


class AdamShard:
    """Owns span `layout.spans[i]` of every layer i. One caller at a time; padding is neither read nor written."""

    def __init__(
        self,
        layout: ShardLayout,
        precision: Precision,
        *,
        working: Tensor,
        residual: Tensor | None,
        m: Tensor,
        v: Tensor,
        hyper: Hyper,
        num_threads: int,
    ) -> None:
        """`working`: 1-D, the whole model's working copies at ModelLayout.starts. The others are the shard's own, 1-D
        of ShardLayout.size: `residual` int16 for bf16, else None; `m` and `v` fp32.

        Raises MegatrainError for a tensor of another type or size.
        """
        _check(precision, layout, {"working": working, "residual": residual, "m": m, "v": v})
        self.layout = layout
        self._working = working
        self._own = {"m": m, "v": v} if residual is None else {"residual": residual, "m": m, "v": v}
        self._hyper = hyper
        self._pool = BlockPool(num_threads)

    def update(self, layer: int, gradient: Tensor, header: UpdateHeader) -> None:
        """One AdamW update of this shard's part of a layer.

        `gradient`: the whole layer's, 1-D, padded size, bf16 or fp32. It is only read.
        """
        if header.skip:
            return
        rates = Rates(torch.tensor(float(header.adam_step)), header.lr, header.scale)
        self._pool.run(job for run in self._runs(layer) for job in self._jobs(layer, run, gradient, rates))

    def load(self, source: WeightSource) -> None:
        """Fills working copy and residual from a source, at most 64 MiB at a time, and zeroes m and v.

        Raises ConfigError naming the parameter when the source holds a NaN.
        """
        for layer in range(len(self.layout.spans)):
            for run in self._runs(layer):
                state = self._state(layer, run)
                state.m.zero_()
                state.v.zero_()
                for start in range(0, run.length, LOAD_ELEMENTS):
                    span = Span(start, min(start + LOAD_ELEMENTS, run.length))
                    state.cut(span).store(_read(source, run, span))

    def pieces(self, layer: int) -> Iterator[Piece]:
        """This shard's part of a layer, kind by kind, in logical coordinates; none where it owns nothing.

        The buffers are the state itself: read to save it, written to restore it.
        """
        flat = self.layout.model.layers[layer]
        logical = flat.logical(self.layout.spans[layer])
        if not logical.size:
            return
        states = [self._state(layer, run) for run in self._runs(layer)]
        working = "working" if "residual" in self._own else "master"
        yield Piece(flat.name, working, logical.start, logical.stop, [_bytes_of(s.working) for s in states])
        for kind in self._own:
            yield Piece(flat.name, kind, logical.start, logical.stop, [_bytes_of(getattr(s, kind)) for s in states])

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._pool.close()

    def _runs(self, layer: int) -> Iterator[Run]:
        return self.layout.model.layers[layer].runs(self.layout.spans[layer])

    def _state(self, layer: int, run: Run) -> AdamState:
        start = self.layout.model.starts[layer] + run.padded
        own_start = self.layout.starts[layer] + run.padded - self.layout.spans[layer].start
        own = {kind: tensor[own_start : own_start + run.length] for kind, tensor in self._own.items()}
        return AdamState(self._working[start : start + run.length], own.get("residual"), own["m"], own["v"])

    def _jobs(self, layer: int, run: Run, gradient: Tensor, rates: Rates) -> Iterator[Job]:
        state = self._state(layer, run)
        flat = gradient[run.padded : run.padded + run.length]
        for span in blocks(run.length):
            yield partial(self._update_block, state, flat, span, rates, run.segment.decay)

    def _update_block(
        self, state: AdamState, gradient: Tensor, span: Span, rates: Rates, decay: bool, scratch: Scratch
    ) -> None:
        # Cut here, by the thread that works on it: the caller alone would keep the others waiting.
        adamw_block(state.cut(span), gradient[slice(*span)], self._hyper, rates, scratch, decay=decay)


def _check(precision: Precision, layout: ShardLayout, tensors: dict[str, Tensor | None]) -> None:
    expected = {kind: (dtype, layout.size) for kind, dtype in precision.state_kinds}
    expected["working"] = (precision.working_dtype, layout.model.size)
    for name, tensor in tensors.items():
        got = None if tensor is None else (tensor.dtype, tensor.numel())
        if got != expected.get(name):
            raise MegatrainError(
                f"optimizer shard {layout.index}: {name} must be {expected.get(name)} for precision "
                f"{precision.value}, got {got} (type, elements)"
            )


def _read(source: WeightSource, run: Run, span: Span) -> Tensor:
    master = source.read(run.segment.name, run.in_segment + span.start, run.in_segment + span.stop)
    if master.isnan().any():
        raise ConfigError(
            f"{run.segment.name} holds a NaN between elements {run.in_segment + span.start} and "
            f"{run.in_segment + span.stop}: its source is damaged; start from other weights"
        )
    return master


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory, writable."""
    return tensor.view(torch.uint8).numpy().data
