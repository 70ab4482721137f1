"""Logs in shared memory what a shard's threads are about to overwrite, so that a kill tears no element.

A transaction of this journal is one update of a shard's part of one layer, with a serial number. It is cut into units.
A thread works on a block of consecutive units of one parameter:

    record.serial = 0 → record.units = the block's, record.saved = 0 → record.serial = the transaction's
    → strip by strip: old contents to the thread's room → record.saved = up to its end → overwrites the strip
    → marks the block's units with the serial, the last one after the others

A record is valid if its serial is that of the torn transaction. Then only what is saved may have been overwritten, the
rest of the block is untouched, and the room is complete as far as it is saved. `roll_back` copies that back and clears
the block's marks. The same update then does all units that are not marked. After a kill in between, both can be done
again. A block that was just finished is done again too, which changes nothing. Serials grow, so what older transactions
left is void.

    header (threads there is room for) | a record each | a mark for each unit of the largest layer | a room each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatrain_ray.engine.layout.flat_layout import ElementRange, round_up
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import (
    BLOCK_ELEMENTS,
    AdamState,
    AdamWConstants,
    ParamCoefficients,
    ParamWeighting,
    UpdateParams,
)
from megatrain_ray.engine.optimizer.stochastic_rounding import rounding_counter
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.words.atomic_words import WORD_BYTES, Words

UNIT_ELEMENTS = 1 << 10  # a multiple of 64; also in native/adamw_kernel.c, which says why
BLOCK_UNITS = BLOCK_ELEMENTS // UNIT_ELEMENTS
RECORD_WORDS = 8  # a cache line: threads write their records all the time
PAGE_BYTES = 4096
_SERIAL, _FIRST, _COUNT, _SAVED = range(4)


class ParamSlice(NamedTuple):
    """Describes a run of one parameter in a shard's part of a layer, for an update."""

    state: AdamState
    gradient_start: int  # where the run begins in the padded gradient that is given
    weighting: ParamWeighting
    first_unit: int  # units are numbered on from those of the run before
    parameter: str = ""  # name in a checkpoint
    in_parameter: int = 0  # the run's first element in that parameter

    @property
    def length(self) -> int:
        return self.state.m.numel()

    @property
    def units(self) -> ElementRange:
        return ElementRange(self.first_unit, self.first_unit + num_units(self.length))

    def coefficients(self, hyper: AdamWConstants, params: UpdateParams) -> ParamCoefficients:
        lr = params.lr * self.weighting.lr_scale
        step = lr * self.weighting.lr_ratio if self.by_muon else lr / (1 - hyper.beta1**params.adam_step)
        return ParamCoefficients(1 - lr * self.weighting.weight_decay, -step)

    def counter(self, hyper: AdamWConstants, params: UpdateParams) -> int:
        """Return the counter of the first element's random bits in an update, or 0 if moments are FP32."""
        if hyper.moments_seed is None:
            return 0
        return rounding_counter(hyper.moments_seed, params.adam_step, self.parameter, self.in_parameter)

    @property
    def by_muon(self) -> bool:
        return self.state.v is None

    def elements(self, units: ElementRange) -> ElementRange:
        """Return the elements of some of the part's units, counted from the run's first element."""
        start, stop = (UNIT_ELEMENTS * (unit - self.first_unit) for unit in units)
        return ElementRange(start, min(stop, self.length))


def num_units(length: int) -> int:
    return -(-length // UNIT_ELEMENTS)


class Journal:
    """Saves blocks before they are overwritten, in zeroed memory or in that of a shard that died.

    Threads write only their own records and rooms.
    """

    def __init__(self, buffer: memoryview, layout: ShardLayout, precision: Precision, num_threads: int) -> None:
        """Use `buffer` as the journal.

        buffer: writable, at least `num_bytes` bytes, at an address that is a multiple of 8.

        Raises MegatrainError for a buffer that is too small or was made for fewer threads.
        """
        num_marks = _num_marks(layout)
        made_for = Words(buffer, 1).load(0) or num_threads
        size = self.num_bytes(layout, precision, made_for)
        if buffer.nbytes < size or made_for < num_threads:
            raise MegatrainError(
                f"optimizer shard {layout.number}: a journal of {buffer.nbytes} bytes made for {made_for} threads, "
                f"expected {size} bytes and {num_threads} threads or more"
            )
        self._first_mark = RECORD_WORDS * (1 + made_for)
        self._words = Words(buffer, self._first_mark + num_marks)
        self._words.store(0, made_for)
        self._num_records = made_for
        self._memory = torch.frombuffer(buffer, dtype=torch.uint8)
        self._marks = np.frombuffer(buffer, np.int64, num_marks, WORD_BYTES * self._first_mark)
        self._room_bytes = room_bytes(precision)
        self._first_room = size - made_for * self._room_bytes

    @staticmethod
    def num_bytes(layout: ShardLayout, precision: Precision, num_threads: int) -> int:
        """Return the bytes of a journal for up to `num_threads` threads.

        A shard with the native kernel touches only 12 KiB of each room.
        """
        words = RECORD_WORDS * (1 + num_threads) + _num_marks(layout)
        return round_up(WORD_BYTES * words, PAGE_BYTES) + num_threads * room_bytes(precision)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Return the addresses of records, marks and rooms for native code, and the bytes from room to room."""
        start = self._memory.data_ptr()
        records, marks = WORD_BYTES * RECORD_WORDS, WORD_BYTES * self._first_mark
        return start + records, start + marks, start + self._first_room, self._room_bytes

    def unmarked_blocks(self, part: ParamSlice, serial: int) -> Iterator[ElementRange]:
        """Yield the part's units that a transaction has still to do, in blocks of at most BLOCK_UNITS units."""
        unmarked = self._marks[slice(*part.units)] != serial
        edges = np.flatnonzero(np.diff(unmarked, prepend=False, append=False)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield from blocks_of(ElementRange(part.first_unit + start, part.first_unit + stop))

    def save(self, thread: int, units: ElementRange, state: AdamState, serial: int) -> None:
        """Save a whole block, which holds `state`, as one strip. Call it before the block is overwritten."""
        record = RECORD_WORDS * (1 + thread)
        self._words.store(record + _SERIAL, 0)
        for old, kept in self._kept(thread, state):
            kept.copy_(old)
        self._words.store(record + _FIRST, units.start)
        self._words.store(record + _COUNT, units.size)
        self._words.store(record + _SAVED, state.m.numel())
        self._words.store(record + _SERIAL, serial)

    def mark(self, units: ElementRange, serial: int) -> None:
        """Mark a block's units, at least one, as done. Call it after the block was overwritten."""
        self._marks[units.start : units.stop - 1] = serial
        self._words.store(self._first_mark + units.stop - 1, serial)

    def roll_back(self, parts: Sequence[ParamSlice], serial: int) -> None:
        """Restore the blocks of these parts of its layer that a torn transaction left half written."""
        for thread in range(self._num_records):
            record = RECORD_WORDS * (1 + thread)
            if self._words.load(record + _SERIAL) != serial:
                continue
            first = self._words.load(record + _FIRST)
            units = ElementRange(first, first + self._words.load(record + _COUNT))
            part = next((part for part in parts if part.units.start <= first < part.units.stop), None)
            if part is None:
                continue
            saved = slice(self._words.load(record + _SAVED))
            for state, kept in self._kept(thread, part.state.cut(part.elements(units))):
                state[saved].copy_(kept[saved])
            self.mark(units, 0)
            self._words.store(record + _SERIAL, 0)

    def _kept(self, thread: int, state: AdamState) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor of a block with its place in the thread's room, where they lie one after another."""
        start = self._first_room + thread * self._room_bytes
        for tensor in state:
            if tensor is not None:
                yield tensor, self._memory[start : start + tensor.nbytes].view(tensor.dtype)
                start += tensor.nbytes


def serial_of(update: int, layer: int, num_layers: int) -> int:
    """Return the serial of the transaction that is one update (from 1) of one layer; no other has it."""
    return update * num_layers + layer + 1


class Transaction(NamedTuple):
    """Names a transaction in a journal."""

    journal: Journal
    serial: int  # positive, and larger than that of every transaction before


def blocks_of(units: ElementRange) -> Iterator[ElementRange]:
    for start in range(units.start, units.stop, BLOCK_UNITS):
        yield ElementRange(start, min(start + BLOCK_UNITS, units.stop))


def _num_marks(layout: ShardLayout) -> int:
    layers = zip(layout.model.layers, layout.spans, strict=True)
    return max((sum(num_units(run.length) for run in layer.runs(span)) for layer, span in layers), default=0)


def room_bytes(precision: Precision) -> int:
    """Return the size of one thread's room: a block of working copy and state."""
    return BLOCK_ELEMENTS * precision.element_bytes
