"""AdamShard: the optimizer of a contiguous span of every layer. A plain class; actors only forward to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain_ray.engine.host.interfaces import UpdateHeader
from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import Hyper
from megatrain_ray.engine.optimizer.kernel_choice import NATIVE, open_kernel
from megatrain_ray.engine.optimizer.undo_log import Journal, Part, Transaction
from megatrain_ray.engine.optimizer.update_kernel import Build
from megatrain_ray.engine.shards.shard_state import ShardState
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.spans import Row


class Gradient(NamedTuple):
    """Of what a host has of all that is trained of a layer, or of a part that begins at element `start` of it.
    `values`: 1-D, padded, bf16 or fp32; None where it was stored. `directions`: bf16, at the same coordinates, where
    Muon trains something of the layer. Both are only read."""

    values: Tensor | None
    directions: Tensor | None = None
    start: int = 0


class AdamShard(ShardState):
    """In host memory, updated by the CPU. One caller at a time."""

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
        """The state as ShardState has it: `residual` int16 for bf16, else None; `m` and `v` fp32, or bf16 where `hyper`
        has a seed for them. `journal`: at least Journal.num_bytes, zeroed, or what a shard that died left. `kernels`:
        candidates, the best first.

        Raises MegatrainError for a tensor of another type or size, a journal made for less, Muon's matrices without
        its constants, or narrow moments without a seed.
        """
        own = {"m": m, "v": v} if residual is None else {"residual": residual, "m": m, "v": v}
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
        self.update_s = 0.0  # that the kernel has worked, waits for a disk not included

    def restorable(self) -> Iterator[list[Piece]]:
        """All pieces, to be filled from a save: some at a time, before the next are asked for."""
        yield [piece for layer in range(len(self.layout.spans)) for piece in self.pieces(layer)]

    @property
    def m(self) -> Tensor:
        """First moments, 1-D of ShardLayout.size; to be read."""
        return self._own["m"]

    @property
    def kernel_name(self) -> str:
        return self._kernel.name

    def store(self, layer: int, gradient: Tensor) -> None:
        """Takes the gradient of all that is trained of a layer (1-D, padded) until its update, which has none then. It
        may be called again with the same one, by a shard that follows one that died."""
        raise MegatrainError(f"optimizer shard {self.layout.number} has no disk for the gradient of layer {layer}")

    def settle(self, layer: int) -> None:
        """Returns when all that updates made of a layer is where it stays. Any thread."""

    def update(
        self, layer: int, gradient: Tensor | None, header: UpdateHeader, serial: int, directions: Tensor | None = None
    ) -> None:
        """One update of this shard's part of a layer: what of transaction `serial` is not done yet.

        `gradient`: of all that the host has of what is trained of the layer, 1-D, padded, bf16 or fp32. It is only
        read. None: the one that was stored. `serial`: positive, larger than that of every update before; that of a
        torn one to finish it, with the same gradient and header. `directions`: bf16, at the same coordinates, where
        Muon trains something of the layer; only read.
        Raises MegatrainError for a gradient or directions of another size or type.
        """
        self._check_gradient(layer, gradient)
        if self.layout.model.layers[layer].num_muon:
            self._check_incoming(layer, "directions", directions, (torch.bfloat16,))
        if not header.skip:
            start = self.layout.model.shares[layer].trained.start
            self._update(layer, Gradient(gradient, directions, start), header, serial)

    def _update(
        self, layer: int, gradient: Gradient, header: UpdateHeader, serial: int, within: Span | None = None
    ) -> None:
        """Of what is in memory: the layer, or a span of it."""
        assert gradient.values is not None
        parts, transaction = self.parts(layer, self.hyper, within, gradient.start), Transaction(self._journal, serial)
        num_bytes = self._traffic(parts, gradient.values) if self.spans.on else 0
        start_s = time.perf_counter()
        with self.spans.span(Row.UPDATES, "update", layer, num_bytes=num_bytes):
            self._kernel.update(parts, gradient.values, header.rates, transaction, gradient.directions)
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

    def _traffic(self, parts: Sequence[Part], gradient: Tensor) -> int:
        """Bytes that an update moves at least: state read and written, the gradient read."""
        state = sum(tensor.nbytes for part in parts for tensor in part.state if tensor is not None)
        return 2 * state + sum(part.length for part in parts) * gradient.itemsize

    def roll_back(self, layer: int, serial: int) -> None:
        """Undoes what a shard that died in transaction `serial` left half written; `update` then does the rest."""
        self._roll_back(layer, serial)

    def _roll_back(self, layer: int, serial: int, within: Span | None = None) -> None:
        """Of what is in memory: the layer, or a span of it."""
        self._journal.roll_back(self.parts(layer, self.hyper, within), serial)

    def _copy(self, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._kernel.copy(pairs)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._kernel.close()
