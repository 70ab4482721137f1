"""Locates a shard's part of every layer in memory, fills it at the start, and lists what a save of it contains."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import WIDE, ElementRange, ParamRun, Segment, round_up
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.layout.split_master import join_into, split_into, to_working
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting
from megatrain_ray.engine.optimizer.torch_kernel import BlockPool, Job, Scratch
from megatrain_ray.engine.optimizer.undo_log import UNIT_ELEMENTS, ParamSlice, num_units
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.saves.manifest import WIDE_KIND
from megatrain_ray.io.saves.save_writer import Buffer, Piece
from megatrain_ray.spans import SpanLog

COPY_ALIGN = 64  # bytes: a cache line
LOAD_ELEMENTS = 1 << 20  # 4 MiB of FP32: larger blocks do not stay in the caches


class ShardState(ABC):
    """Owns span `layout.spans[i]` of every layer i, and loads and saves `layout.frozen_spans[i]`.

    Padding is neither read nor written.
    """

    def __init__(
        self, layout: ShardLayout, precision: Precision, *, working: Tensor, own: Mapping[str, Tensor],
        saves_frozen: bool = True,
    ) -> None:  # fmt: skip
        """Take over tensors that the caller has allocated.

        working: 1-D, working copies at ShardLayout.working_starts.
        own: the shard's own state, by kind as in Precision.state_kinds. Each tensor is 1-D, of
            ShardLayout.size_of(kind) elements.
        saves_frozen: whether the pieces include frozen parameters.

        Raises MegatrainError for a tensor of the wrong type or size.
        """
        _check(precision, layout, {"working": working, **own})
        self.layout = layout
        self._working = working
        self._own = dict(own)
        self._saves_frozen = saves_frozen
        self.spans = SpanLog()

    def load(self, source: WeightSource, num_threads: int = 1) -> None:
        """Fill working copy and residual of the layers in `layout.filled` from a source, and set m and v to zero.

        The source is read at most 4 MiB at a time.

        num_threads: number of parameters that are filled at the same time.

        Raises ConfigError naming the parameter if the source holds a NaN or an infinity.
        """
        layers = sorted(self.layout.filled - self.layout.spilled)
        trained = [(run, partial(self._load, source, layer, run)) for layer in layers for run in self._runs(layer)]
        fill([*trained, *self._frozen(source)], num_threads)
        if self.layout.model.aliased_size is not None and "residual" in self._own:
            self._own["residual"].zero_()  # in aliased memory it can meet another weight and make a NaN of it

    def load_frozen(self, source: WeightSource, num_threads: int = 1) -> None:
        """Fill the working copy of frozen parameters, which have no other state, as `load` does."""
        fill(self._frozen(source), num_threads)

    def _frozen(self, source: WeightSource) -> Iterator[tuple[ParamRun, Job]]:
        for layer in sorted(self.layout.filled):
            for run in self._frozen_runs(layer):
                yield run, partial(load_run, source, run, self._working_of(layer, run), None, None)

    def _load(self, source: WeightSource, layer: int, run: ParamRun, _: Scratch) -> None:
        state = self._state(layer, run)
        state.m.zero_()
        if state.v is not None:
            state.v.zero_()
        load_run(source, run, state.working, state.residual, self._wide_of(layer, run))

    def refresh_wide(self, layer: int, within: ElementRange | None = None) -> None:
        """Set the wide copies of the shard's part of a layer, or of the span `within` of it, to the masters."""
        for working, residual, wide in self._wide(layer, within):
            join_into(working, residual, wide)

    def _wide(self, layer: int, within: ElementRange | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield working copy, residual and wide copy of each run that has a wide copy."""
        for run in self._runs(layer, within) if self.layout.model.layers[layer].wide_segments else ():
            if (wide := self._wide_of(layer, run)) is not None:
                state = self._state(layer, run)
                assert state.residual is not None  # only a model that streams as bf16 has wide copies
                yield state.working, state.residual, wide

    def pieces(self, layer: int) -> Iterator[Piece]:
        """Yield this shard's part of a layer, one piece for each kind of state, in logical coordinates.

        Yields nothing if the shard owns nothing of the layer. Pieces of frozen parameters come last, if they are saved.
        The buffers are the state itself: read to save it, written to restore it.
        """
        yield from self._pieces_of(layer, self._buffers(layer))
        yield from self._frozen_pieces(layer)

    def _pieces_of(
        self, layer: int, buffers: Mapping[str, Sequence[Buffer]], within: ElementRange | None = None
    ) -> Iterator[Piece]:
        for kind, of_kind in buffers.items():
            yield self._piece(layer, kind, within or self.layout.span_of(layer, kind), [*of_kind])

    def _frozen_pieces(self, layer: int) -> Iterator[Piece]:
        by_kind = {self._working_kind: [r for r in self._frozen_runs(layer) if not r.segment.fp32]}
        by_kind[WIDE_KIND] = [r for r in self._frozen_runs(layer) if r.segment.fp32]
        for kind, runs in by_kind.items():
            if runs and self._saves_frozen:
                buffers = [self._buffer(self._working_of(layer, run).view(torch.uint8)) for run in runs]
                span = runs[0].logical, runs[-1].logical + runs[-1].length
                yield Piece(self.layout.model.layers[layer].name, kind, *span, buffers)

    def _piece(self, layer: int, kind: str, span: ElementRange, buffers: list[Buffer]) -> Piece:
        flat = self.layout.model.layers[layer]
        return Piece(flat.name, kind, *flat.logical(span), buffers)

    def copy_bytes(self, layer: int) -> int:
        """Return the bytes that `copy_layer` needs, or 0 if no update changes anything of the layer."""
        return sum(round_up(size, COPY_ALIGN) for sizes in self._sizes(layer).values() for size in sizes)

    def copy_layer(self, layer: int, memory: Tensor) -> list[Piece]:
        """Copy what an update changes of a layer, as it is now, and return the layer's pieces over the copy.

        memory: 1-D uint8, at least `copy_bytes(layer)`; holds the copy.

        Frozen parameters are not copied: their piece is over the state.
        """
        copies: dict[str, list[Tensor]] = {}
        start = 0
        for kind, sizes in self._sizes(layer).items():
            for size in sizes:
                copies.setdefault(kind, []).append(memory[start : start + size])
                start += round_up(size, COPY_ALIGN)
        self._copy_state(layer, copies)
        buffers = {kind: [copy.numpy().data for copy in of_kind] for kind, of_kind in copies.items()}
        return [*self._pieces_of(layer, buffers), *self._frozen_pieces(layer)]

    def _copy_state(self, layer: int, copies: Mapping[str, Sequence[Tensor]]) -> None:
        tensors = self._kinds(layer)
        self._copy(layer, [pair for kind in copies for pair in zip(copies[kind], tensors[kind], strict=True)])

    @abstractmethod
    def _copy(self, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair (1-D uint8) over the first, which is on the host."""

    def _buffers(self, layer: int, within: ElementRange | None = None) -> dict[str, list[Buffer]]:
        return {kind: [*map(self._buffer, tensors)] for kind, tensors in self._kinds(layer, within).items()}

    def _buffer(self, tensor: Tensor) -> Buffer:
        return tensor.numpy().data

    def fetch(self, part: Piece) -> Piece:
        """Return a part of a piece with its bytes on the host, so that it can be written.

        The bytes may change when the state does. So the state must not change until the part is written.
        """
        return part

    def parts(
        self, layer: int, hyper: AdamWConstants, within: ElementRange | None = None, gradient_start: int = 0
    ) -> list[ParamSlice]:
        """Return the parts that an update of a layer works on.

        within: padded span of the layer that begins and ends with journal units. None: all that the shard owns of the
            layer.
        gradient_start: first element of the layer (padded) that the gradient has.
        """
        firsts, unit = {}, 0
        for run in self.layout.model.layers[layer].runs(self.layout.spans[layer]):
            firsts[run.segment.name] = run.padded, unit
            unit += num_units(run.length)
        parts = []
        for run in self._runs(layer, within):
            start, unit = firsts[run.segment.name]
            unit += (run.padded - start) // UNIT_ELEMENTS
            weighting, in_gradient = _weighting(run.segment, hyper), run.padded - gradient_start
            parts.append(ParamSlice(self._state(layer, run), in_gradient, weighting, unit, *run.in_whole))
        return parts

    def _runs(self, layer: int, within: ElementRange | None = None) -> Iterator[ParamRun]:
        return self.layout.model.layers[layer].runs(within or self.layout.spans[layer])

    def _frozen_runs(self, layer: int) -> Iterator[ParamRun]:
        return self.layout.model.layers[layer].runs(self.layout.frozen_spans[layer])

    def _working_of(self, layer: int, run: ParamRun) -> Tensor:
        values = self._working_slice(layer, run.padded, run.length * run.segment.width)
        return values if run.segment.width == 1 else values.view(torch.float32)

    def _wide_of(self, layer: int, run: ParamRun) -> Tensor | None:
        """Return the wide copy of a trained run: 1-D, FP32; None if it has none."""
        if not run.segment.fp32:
            return None
        start = run.segment.read_start + WIDE * run.in_segment
        return self._working_slice(layer, start, WIDE * run.length).view(torch.float32)

    def _working_slice(self, layer: int, padded: int, size: int) -> Tensor:
        start = self.layout.working_starts[layer] + self.layout.model.shares[layer].position(padded)
        return self._working[start : start + size]

    def _state(self, layer: int, run: ParamRun) -> AdamState:
        tensors, start = self._own_around(layer, run)
        first = run.padded - start  # for v too: parameters that have a second moment come first
        own = {kind: tensor[first : first + run.length] for kind, tensor in tensors.items()}
        v = None if run.segment.muon else own["v"]
        return AdamState(self._working_of(layer, run), own.get("residual"), own["m"], v)

    def _own_around(self, layer: int, run: ParamRun) -> tuple[Mapping[str, Tensor], int]:
        """Return a stretch of the layer that contains the run: its own state by kind, and its first padded element."""
        starts = {kind: self.layout.v_starts if kind == "v" else self.layout.starts for kind in self._own}
        tensors = {
            kind: tensor[starts[kind][layer] :][: self.layout.span_of(layer, kind).size]
            for kind, tensor in self._own.items()
        }
        return tensors, self.layout.spans[layer].start

    @property
    def _working_kind(self) -> str:
        return "working" if "residual" in self._own else "master"

    def _kinds(self, layer: int, within: ElementRange | None = None) -> dict[str, list[Tensor]]:
        """Return the layer's trained state by kind, as bytes (1-D uint8), run after run."""
        states = [self._state(layer, run) for run in self._runs(layer, within)]
        named = {self._working_kind: [state.working for state in states]}
        named |= {kind: [t for state in states if (t := getattr(state, kind)) is not None] for kind in self._own}
        return {kind: [tensor.view(torch.uint8) for tensor in tensors] for kind, tensors in named.items() if tensors}

    def _sizes(self, layer: int) -> dict[str, list[int]]:
        """Return the sizes in bytes of what `_kinds` returns, also of state that is not in memory."""
        runs = list(self._runs(layer))
        sizes = {self._working_kind: [run.length * self._working.itemsize for run in runs]}
        for kind, tensor in self._own.items():
            sizes[kind] = [run.length * tensor.itemsize for run in runs if kind != "v" or not run.segment.muon]
        return sizes


def _check(precision: Precision, layout: ShardLayout, tensors: Mapping[str, Tensor]) -> None:
    expected = {kind: (dtype, layout.size_of(kind)) for kind, dtype in precision.state_kinds}
    expected["working"] = (precision.working_dtype, layout.working_size)
    for name in sorted(expected.keys() | tensors.keys()):
        got = (tensors[name].dtype, tensors[name].numel()) if name in tensors else None
        if got != expected.get(name):
            raise MegatrainError(
                f"optimizer shard {layout.number}: {name} must be {expected.get(name)} for precision "
                f"{precision.value}, got {got} (type, elements)"
            )


def _weighting(segment: Segment, hyper: AdamWConstants) -> ParamWeighting:
    group = segment.group
    common = hyper.weight_decay if segment.decay else 0.0
    ratio = hyper.muon.adjust_lr.ratio(segment.shape) if hyper.muon and segment.muon else 1.0
    return ParamWeighting(group.lr_scale, common if group.weight_decay is None else group.weight_decay, ratio)


def fill(jobs: Iterable[tuple[ParamRun, Job]], num_threads: int) -> None:
    """Run the jobs that fill runs of parameters, in `num_threads` threads.

    The longest run is started first, so that no thread is left with it at the end.
    """
    with closing(BlockPool(num_threads)) as pool:
        pool.run([job for _, job in sorted(jobs, key=lambda pair: -pair[0].length)])


def load_run(
    source: WeightSource, run: ParamRun, working: Tensor, residual: Tensor | None, wide: Tensor | None,
    _: Scratch | None = None,
) -> None:  # fmt: skip
    """Fill a run's working copy, residual and wide copy from a source.

    residual: None if the working copy is the FP32 master itself, or if the parameter is frozen.
    wide: None if a trained parameter has no wide copy; that of a frozen one is `working`.

    Raises ConfigError if the source holds a NaN or an infinity.
    """
    scratch = torch.empty(min(run.length, LOAD_ELEMENTS), dtype=torch.int32)
    for start in range(0, run.length, LOAD_ELEMENTS):
        span = ElementRange(start, min(start + LOAD_ELEMENTS, run.length))
        master, at = _read(source, run, span), slice(*span)
        if residual is not None:
            split_into(master, working[at], residual[at], scratch[: span.size])
        else:
            working[at] = master if working.dtype == torch.float32 else to_working(master)
        if wide is not None:
            wide[at] = master


def _read(source: WeightSource, run: ParamRun, span: ElementRange) -> Tensor:
    name, first = run.in_whole
    master = source.read(name, first + span.start, first + span.stop)
    if not math.isfinite(master.sum().item()):  # also if finite values overflow: then no bad value is found
        bad = (~master.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            raise ConfigError(
                f"{run.segment.name} holds {master[at].item()} at element {run.in_segment + span.start + at}: its "
                "source is damaged; start from other weights"
            )
    return master
