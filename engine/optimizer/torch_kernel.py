"""Implements the portable update kernel: torch's own AdamW on blocks that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.optimizer.adamw import Hyper, Rates, Scratch, adamw_block
from megatrain_ray.engine.optimizer.block_pool import BlockPool, Job
from megatrain_ray.engine.optimizer.muon_block import muon_block
from megatrain_ray.engine.optimizer.undo_log import Part, Transaction, blocks_of

COPY_ELEMENTS = 1 << 20


class TorchBlocks:
    """Is an UpdateKernel for every machine on which torch runs."""

    name = "torch blocks"

    def __init__(self, num_threads: int, hyper: Hyper) -> None:
        self._hyper = hyper
        self._pool = BlockPool(num_threads)

    def update(
        self,
        parts: Sequence[Part],
        gradient: Tensor,
        rates: Rates,
        transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:
        self._pool.run(job for part in parts for job in self._jobs(part, gradient, rates, transaction, directions))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pool.run(job for to, source in pairs for job in _copy_jobs(to, source))

    def close(self) -> None:
        self._pool.close()

    def _jobs(
        self,
        part: Part,
        gradient: Tensor,
        rates: Rates,
        transaction: Transaction | None,
        directions: Tensor | None,
    ) -> Iterator[Job]:
        blocks = transaction.journal.unmarked_blocks(part, transaction.serial) if transaction else blocks_of(part.units)
        own = slice(part.gradient_start, part.gradient_start + part.length)
        moved = directions[own] if directions is not None and part.by_muon else None
        counter = part.counter(self._hyper, rates)
        for units in blocks:
            yield partial(self._update_block, part, units, gradient[own], rates, transaction, moved, counter)

    def _update_block(
        self,
        part: Part,
        units: Span,
        gradient: Tensor,
        rates: Rates,
        transaction: Transaction | None,
        directions: Tensor | None,
        counter: int,
        scratch: Scratch,
    ) -> None:
        # Cut here, by the thread that works on the block: if only the caller cut, the others would wait for it.
        elements = part.elements(units)
        state = part.state.cut(elements)
        if transaction:
            transaction.journal.save(scratch.thread, units, state, transaction.serial)
        own = gradient[slice(*elements)]
        if directions is None:
            adamw_block(state, own, self._hyper, rates, part.weighting, scratch, counter + elements.start)
        else:
            assert self._hyper.muon is not None  # only Muon has directions
            muon_block(state, own, directions[slice(*elements)], self._hyper.muon, rates, part.weighting, scratch)
        if transaction:
            transaction.journal.mark(units, transaction.serial)


def _copy_jobs(to: Tensor, source: Tensor) -> Iterator[Job]:
    for start in range(0, source.numel(), COPY_ELEMENTS):
        piece = slice(start, start + COPY_ELEMENTS)
        yield partial(_copy, to[piece], source[piece])


def _copy(to: Tensor, source: Tensor, _: Scratch) -> None:
    to.copy_(source)
