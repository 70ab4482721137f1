"""Applies the optimizer to one contiguous span of every layer, on the CPU.

AdamShard is a plain class: actors only forward to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import AdamWConstants, UpdateParams
from megatrain_ray.engine.optimizer.undo_log import Journal, ParamSlice, Transaction
from megatrain_ray.engine.optimizer.update_kernel import NATIVE, Build, open_kernel
from megatrain_ray.engine.shards.shard_state import ShardState
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.spans import Row


class Gradient(NamedTuple):
    """Holds the host's gradient of a layer's trained part, or of a range of it; only read."""

    values: Tensor | None  # 1-D, padded, bf16 or fp32; None if the gradient was stored on disk
    directions: Tensor | None = None  # 1-D, bf16, at the same coordinates, if Muon trains something of the layer
    start: int = 0  # element of the layer (padded) at which `values` begins


class AdamShard(ShardState):
    """Keeps a shard's state in host memory and updates it on the CPU. Only one caller at a time."""

    def __init__(
        self, layout: ShardLayout, precision: Precision, *, working: Tensor, own: Mapping[str, Tensor],
        hyper: AdamWConstants, num_threads: int, journal: memoryview, saves_frozen: bool = True,
        kernels: tuple[Build, ...] = NATIVE,
    ) -> None:  # fmt: skip
        """Build the shard over state that the caller has allocated, as ShardState describes it.

        journal: at least Journal.num_bytes, zeroed, or what a shard that died left in it.
        kernels: candidate update kernels, the best first.

        Raises MegatrainError for a tensor of the wrong type or size, a journal that was made for less, missing
        constants of Muon, and if only one of bf16 moments and their seed is given.
        """
        super().__init__(layout, precision, working=working, own=own, saves_frozen=saves_frozen)
        if layout.model.with_muon and hyper.muon is None:
            raise MegatrainError(f"optimizer shard {layout.number}: Muon trains some of the model and has no constants")
        if (precision.moment_dtype is torch.bfloat16) != (hyper.moments_seed is not None):
            raise MegatrainError(
                f"optimizer shard {layout.number}: moments are {precision.moments} and the seed of their rounding is "
                f"{hyper.moments_seed}"
            )
        self.hyper = hyper
        self._journal = Journal(journal, layout, precision, num_threads)
        self._kernel = open_kernel(num_threads, hyper, kernels)
        self.update_s = 0.0  # seconds spent in the kernel, without waits for a disk

    def restorable(self) -> Iterator[list[Piece]]:
        """Yield groups that together hold all pieces, to be filled from a save.

        Fill one group before asking for the next. Wide copies are no part of a save, and are set after that.
        """
        layers = range(len(self.layout.spans))
        yield [piece for layer in layers for piece in self.pieces(layer)]
        for layer in layers:
            self.refresh_wide(layer)

    @property
    def m(self) -> Tensor:
        """Return the first moments: 1-D, ShardLayout.size elements, only to be read."""
        return self._own["m"]

    @property
    def kernel_name(self) -> str:
        return self._kernel.name

    def store(self, layer: int, gradient: Tensor) -> None:
        """Store the gradient (1-D, padded) of a layer's trained part until its update, which is called without one.

        A shard that replaces one that died may be given the same gradient again. Raises MegatrainError here, because
        only a SpillingShard has a disk.
        """
        raise MegatrainError(f"optimizer shard {self.layout.number} has no disk for the gradient of layer {layer}")

    def update(
        self, layer: int, gradient: Tensor | None, params: UpdateParams, serial: int, directions: Tensor | None = None
    ) -> None:
        """Apply one update to this shard's part of a layer, as far as transaction `serial` has not done it yet.

        gradient: the host's gradient of the layer's trained part, 1-D, padded, bf16 or fp32; only read. None: use the
            one that was stored.
        serial: positive and larger than that of every earlier update. To finish a torn update, pass its serial with the
            same gradient and parameters.
        directions: bf16, at the same coordinates, if Muon trains something of the layer; only read.

        Raises MegatrainError for a gradient or directions of the wrong size or type.
        """
        self._check_gradient(layer, gradient)
        if self.layout.model.layers[layer].num_muon:
            self._check_incoming(layer, "directions", directions, (torch.bfloat16,))
        if not params.skip:
            start = self.layout.model.shares[layer].trained.start
            self._update(layer, Gradient(gradient, directions, start), params, serial)

    def _update(
        self, layer: int, gradient: Gradient, params: UpdateParams, serial: int, within: ElementRange | None = None
    ) -> None:
        """Update the shard's part of a layer, or the span `within` of it. What is updated must be in memory."""
        assert gradient.values is not None
        parts = self.parts(layer, self.hyper, within, gradient.start)
        transaction = Transaction(self._journal, serial)
        num_bytes = _traffic(parts, gradient.values) if self.spans.on else 0
        start_s = time.perf_counter()
        with self.spans.span(Row.UPDATES, "update", layer, num_bytes=num_bytes):
            self._kernel.update(parts, gradient.values, params, transaction, gradient.directions)
            self.refresh_wide(layer, within)
        self.update_s += time.perf_counter() - start_s

    def _check_gradient(self, layer: int, gradient: Tensor | None) -> None:
        self._check_incoming(layer, "gradient", gradient, (torch.bfloat16, torch.float32))

    def _check_incoming(self, layer: int, name: str, got: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> None:
        size = self.layout.model.shares[layer].trained.size
        if got is None or got.numel() != size or got.dtype not in dtypes:
            found = "none" if got is None else f"{got.numel()} of {got.dtype}"
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise MegatrainError(
                f"optimizer shard {self.layout.number}: the {name} of layer {layer} must be {size} elements of "
                f"{expected}, got {found}"
            )

    def roll_back(self, layer: int, serial: int) -> None:
        """Undo what a shard that died in transaction `serial` left half written; `update` then does the rest."""
        self._journal.roll_back(self.parts(layer, self.hyper), serial)

    def _copy(self, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._kernel.copy(pairs)

    def close(self) -> None:
        self._kernel.close()


def _traffic(parts: Sequence[ParamSlice], gradient: Tensor) -> int:
    """Return the fewest bytes that an update can move: state read and written, and the gradient read."""
    state = sum(tensor.nbytes for part in parts for tensor in part.state if tensor is not None)
    return 2 * state + sum(part.length for part in parts) * gradient.itemsize
