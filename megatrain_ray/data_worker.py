"""The process that reads, tokenises and draws batches, with the position after each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatrain_ray.config import DataConfig
from megatrain_ray.io.batches import Batch, BatchStream
from megatrain_ray.io.windows import TokenWindows, load_windows

REMEMBERED_STEPS = 64  # positions kept: more than steps can be ahead of a save


def open_windows(data: DataConfig, tokenizer: str, vocab_size: int) -> TokenWindows:
    """The windows of `data.path`. Raises ConfigError for anything wrong with files, tokenizer or ids."""
    return load_windows(data.path, tokenizer, seq_len=data.seq_len, packing=data.packing, vocab_size=vocab_size)


class DataWorker:
    """Plain class behind the data actor: batches in the order of steps."""

    def __init__(
        self, data: DataConfig, tokenizer: str, vocab_size: int, batch_size: int, step: int,
        position: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Continues after `step` updates at `position`; None: from the start."""
        windows = open_windows(data, tokenizer, vocab_size)
        self._stream = BatchStream(windows, batch_size=batch_size, shuffle=data.shuffle, seed=data.seed)
        if position is not None:
            self._stream.seek(position)
        self._step = step
        self._positions = {step: self._stream.position}

    def pid(self) -> int:
        return os.getpid()

    def batch(self, step: int) -> Batch:
        """The batch of a step; steps must be asked for in order."""
        if step != self._step + 1:
            raise ValueError(f"step {step} asked for, the next is {self._step + 1}")
        batch = self._stream.next_batch()
        self._step = step
        self._positions[step] = self._stream.position
        self._positions.pop(step - REMEMBERED_STEPS, None)
        return batch

    def position(self, step: int) -> dict[str, Any]:
        """Where the data stood after `step` updates; part of a save."""
        return self._positions[step]
