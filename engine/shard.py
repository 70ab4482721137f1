"""AdamShard: the optimizer of a contiguous span of every layer. A plain class; actors only forward to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_ray.engine.adamw import AdamState, Hyper, Rates, Weighting
from megatrain_ray.engine.journal import Journal, Part, Transaction
from megatrain_ray.engine.kernel_choice import NATIVE, open_kernel
from megatrain_ray.engine.layout import Run, Segment, Span, round_up
from megatrain_ray.engine.load import WeightSource
from megatrain_ray.engine.plan import Precision
from megatrain_ray.engine.shard_layout import ShardLayout
from megatrain_ray.engine.update_kernel import Build
from megatrain_ray.engine.working_copy import to_working
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.save import Piece
from megatrain_ray.spans import Row, SpanLog

COPY_ALIGN = 64  # bytes: a cache line
LOAD_ELEMENTS = 1 << 20  # 4 MiB of FP32: larger ones leave the caches


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


class AdamShard:
    """Owns span `layout.spans[i]` of every layer i, and loads and saves `layout.frozen_spans[i]`. One caller at a time;
    padding is neither read nor written."""

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
        journal: memoryview,
        saves_frozen: bool = True,
        kernels: tuple[Build, ...] = NATIVE,
    ) -> None:
        """`working`: 1-D, the whole model's working copies at ModelLayout.starts. The others are the shard's own, 1-D
        of ShardLayout.size_of: `residual` int16 for bf16, else None; `m` and `v` fp32. `journal`: at least
        Journal.num_bytes, zeroed, or what a shard that died left. `saves_frozen`: whether what is frozen is among the
        pieces of a save. `kernels`: candidates, the best first.

        Raises MegatrainError for a tensor of another type or size, a journal made for less, or Muon's matrices without
        its constants.
        """
        _check(precision, layout, hyper, {"working": working, "residual": residual, "m": m, "v": v})
        self.layout = layout
        self._working = working
        self.spans = SpanLog()
        self._own = {"m": m, "v": v} if residual is None else {"residual": residual, "m": m, "v": v}
        self._hyper = hyper
        self._saves_frozen = saves_frozen
        self._journal = Journal(journal, layout, precision, num_threads)
        self._kernel = open_kernel(num_threads, hyper, kernels)

    @property
    def m(self) -> Tensor:
        """First moments, 1-D of ShardLayout.size; to be read."""
        return self._own["m"]

    @property
    def kernel_name(self) -> str:
        return self._kernel.name

    def update(
        self, layer: int, gradient: Tensor, header: UpdateHeader, serial: int, directions: Tensor | None = None
    ) -> None:
        """One update of this shard's part of a layer: what of transaction `serial` is not done yet.

        `gradient`: of all that is trained of the layer, 1-D, padded, bf16 or fp32. It is only read. `serial`: positive,
        larger than that of every update before; that of a torn one to finish it, with the same gradient and header.
        `directions`: bf16, at the same coordinates, where Muon trains something of the layer; only read.
        Raises MegatrainError for a gradient or directions of another size or type.
        """
        self._check_incoming(layer, "gradient", gradient, (torch.bfloat16, torch.float32))
        if self.layout.model.layers[layer].num_muon:
            self._check_incoming(layer, "directions", directions, (torch.bfloat16,))
        if header.skip:
            return
        rates = Rates(torch.tensor(float(header.adam_step)), header.lr, header.scale)
        num_bytes = self._traffic(layer, gradient) if self.spans.on else 0
        with self.spans.span(Row.UPDATES, "update", layer, num_bytes=num_bytes):
            self._kernel.update(self._parts(layer), gradient, rates, Transaction(self._journal, serial), directions)

    def _check_incoming(self, layer: int, name: str, got: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> None:
        size = self.layout.model.layers[layer].trained.size
        if got is None or got.numel() != size or got.dtype not in dtypes:
            found = "none" if got is None else f"{got.numel()} of {got.dtype}"
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise MegatrainError(
                f"optimizer shard {self.layout.index}: the {name} of layer {layer} must be {size} elements of "
                f"{expected}, got {found}"
            )

    def _traffic(self, layer: int, gradient: Tensor) -> int:
        """Bytes that an update moves at least: state read and written, the gradient read."""
        state = sum(tensor.nbytes for tensors in self._kinds(layer).values() for tensor in tensors)
        return 2 * state + self.layout.spans[layer].size * gradient.itemsize

    def roll_back(self, layer: int, serial: int) -> None:
        """Undoes what a shard that died in transaction `serial` left half written; `update` then does the rest."""
        self._journal.roll_back(self._parts(layer), serial)

    def load(self, source: WeightSource) -> None:
        """Fills working copy and residual from a source, at most 4 MiB at a time, and zeroes m and v.

        Raises ConfigError naming the parameter when the source holds a NaN or an infinity.
        """
        self.load_frozen(source)
        for layer in range(len(self.layout.spans)):
            for run in self._runs(layer):
                state = self._state(layer, run)
                state.m.zero_()
                if state.v is not None:
                    state.v.zero_()
                for span in _blocks(run):
                    state.cut(span).store(_read(source, run, span))

    def load_frozen(self, source: WeightSource) -> None:
        """The same of what is frozen, which is the working copy alone."""
        for layer in range(len(self.layout.spans)):
            for run in self._frozen_runs(layer):
                working = self._working_of(layer, run)
                for span in _blocks(run):
                    master = _read(source, run, span)
                    working[slice(*span)] = master if working.dtype == torch.float32 else to_working(master)

    def pieces(self, layer: int) -> Iterator[Piece]:
        """This shard's part of a layer, kind by kind, in logical coordinates; none where it owns nothing. At last what
        is frozen, if that is saved.

        The buffers are the state itself: read to save it, written to restore it.
        """
        for kind, tensors in self._kinds(layer).items():
            yield self._piece(layer, kind, self._span(layer, kind), tensors)
        yield from self._frozen_pieces(layer)

    def _frozen_pieces(self, layer: int) -> Iterator[Piece]:
        frozen = [self._working_of(layer, run).view(torch.uint8) for run in self._frozen_runs(layer)]
        if frozen and self._saves_frozen:
            yield self._piece(layer, self._working_kind, self.layout.frozen_spans[layer], frozen)

    def _span(self, layer: int, kind: str) -> Span:
        return (self.layout.v_spans if kind == "v" else self.layout.spans)[layer]

    def _piece(self, layer: int, kind: str, span: Span, tensors: Sequence[Tensor]) -> Piece:
        flat = self.layout.model.layers[layer]
        return Piece(flat.name, kind, *flat.logical(span), [tensor.numpy().data for tensor in tensors])

    def copy_bytes(self, layer: int) -> int:
        """Room that `copy_layer` needs."""
        return sum(round_up(t.nbytes, COPY_ALIGN) for tensors in self._kinds(layer).values() for t in tensors)

    def copy_layer(self, layer: int, memory: Tensor) -> list[Piece]:
        """The same pieces, what an update changes over `memory` (1-D uint8, at least `copy_bytes`) with what the state
        holds now; what is frozen is not copied."""
        pieces: list[Piece] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        start = 0
        for kind, tensors in self._kinds(layer).items():
            copies = []
            for tensor in tensors:
                copies.append(memory[start : start + tensor.nbytes])
                start += round_up(tensor.nbytes, COPY_ALIGN)
            pairs += zip(copies, tensors, strict=True)
            pieces.append(self._piece(layer, kind, self._span(layer, kind), copies))
        self._kernel.copy(pairs)
        return [*pieces, *self._frozen_pieces(layer)]

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._kernel.close()

    def _runs(self, layer: int) -> Iterator[Run]:
        return self.layout.model.layers[layer].runs(self.layout.spans[layer])

    def _frozen_runs(self, layer: int) -> Iterator[Run]:
        return self.layout.model.layers[layer].runs(self.layout.frozen_spans[layer])

    def _working_of(self, layer: int, run: Run) -> Tensor:
        start = self.layout.model.starts[layer] + run.padded
        return self._working[start : start + run.length]

    def _state(self, layer: int, run: Run) -> AdamState:
        in_span = run.padded - self.layout.spans[layer].start  # what has a second moment comes first
        starts = {kind: self.layout.v_starts if kind == "v" else self.layout.starts for kind in self._own}
        firsts = {kind: of_layers[layer] + in_span for kind, of_layers in starts.items()}
        own = {kind: tensor[firsts[kind] : firsts[kind] + run.length] for kind, tensor in self._own.items()}
        v = None if run.segment.muon else own["v"]
        return AdamState(self._working_of(layer, run), own.get("residual"), own["m"], v)

    def _parts(self, layer: int) -> list[Part]:
        parts, unit = [], 0
        for run in self._runs(layer):
            part = Part(self._state(layer, run), run.padded, self._weighting(run.segment), unit)
            parts.append(part)
            unit = part.units.stop
        return parts

    def _weighting(self, segment: Segment) -> Weighting:
        group = segment.group
        common = self._hyper.weight_decay if segment.decay else 0.0
        muon = self._hyper.muon
        ratio = muon.adjust_lr.ratio(segment.shape) if muon and segment.muon else 1.0
        return Weighting(group.lr_scale, common if group.weight_decay is None else group.weight_decay, ratio)

    @property
    def _working_kind(self) -> str:
        return "working" if "residual" in self._own else "master"

    def _kinds(self, layer: int) -> dict[str, list[Tensor]]:
        """The bytes of each kind of state of what is trained, run after run."""
        states = [self._state(layer, run) for run in self._runs(layer)]
        named = {self._working_kind: [state.working for state in states]}
        named |= {kind: [t for state in states if (t := getattr(state, kind)) is not None] for kind in self._own}
        return {kind: [tensor.view(torch.uint8) for tensor in tensors] for kind, tensors in named.items() if tensors}


def _check(precision: Precision, layout: ShardLayout, hyper: Hyper, tensors: dict[str, Tensor | None]) -> None:
    if layout.model.with_muon and hyper.muon is None:
        raise MegatrainError(f"optimizer shard {layout.index}: Muon trains some of the model and has no constants")
    expected = {kind: (dtype, layout.size_of(kind)) for kind, dtype in precision.state_kinds}
    expected["working"] = (precision.working_dtype, layout.model.size)
    for name, tensor in tensors.items():
        got = None if tensor is None else (tensor.dtype, tensor.numel())
        if got != expected.get(name):
            raise MegatrainError(
                f"optimizer shard {layout.index}: {name} must be {expected.get(name)} for precision "
                f"{precision.value}, got {got} (type, elements)"
            )


def _blocks(run: Run) -> Iterator[Span]:
    for start in range(0, run.length, LOAD_ELEMENTS):
        yield Span(start, min(start + LOAD_ELEMENTS, run.length))


def _read(source: WeightSource, run: Run, span: Span) -> Tensor:
    master = source.read(run.segment.name, run.in_segment + span.start, run.in_segment + span.stop)
    if not math.isfinite(master.sum().item()):  # or finite values overflow: then no bad one is found
        bad = (~master.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            raise ConfigError(
                f"{run.segment.name} holds {master[at].item()} at element {run.in_segment + span.start + at}: its "
                "source is damaged; start from other weights"
            )
    return master
