"""Implements `Ranks` among threads of this process, for runs whose GPU workers share one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from megatrain_ray.engine.device.rank_group import LOOPBACK, Rendezvous
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.errors import LostPeerError


class _Table:
    """Shows each of `size` threads the tensors that all of them bring."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._brought = [torch.empty(0)] * size

    def exchange(self, rank: int, values: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """Return copies of the values of all ranks, by rank. Raises LostPeerError after `timeout_s` seconds."""
        self._brought[rank] = values
        try:
            self._barrier.wait(timeout_s)
            found = [brought.clone() for brought in self._brought]
            self._barrier.wait(timeout_s)  # now the values may change
        except threading.BrokenBarrierError:
            raise LostPeerError(f"rank {rank} lost the others") from None
        return found


TABLES: dict[tuple[Rendezvous, str], _Table] = {}
LOCK = threading.Lock()


class ThreadRanks:
    """Stands in for RankGroup, whose process can have only one."""

    def __init__(
        self, device: torch.device, place: Rendezvous, rank: int, size: int, timeout_s: float, address: str = LOOPBACK,
        *, gathers: bool = False,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        with LOCK:  # gathers run concurrently with sums
            self._sums = TABLES.setdefault((place, "sums"), _Table(size))
            self._gathers = TABLES.setdefault((place, "gathers"), _Table(size))

    def sum_part(self, flat: torch.Tensor, part: ElementRange) -> None:
        self.sum(flat)

    def sum(self, values: torch.Tensor) -> None:
        first, *others = self._sums.exchange(self.rank, values, self._timeout_s)
        with torch.no_grad():
            for other in others:
                first += other
            values.copy_(first)

    def all_gather(self, flat: torch.Tensor, parts: Sequence[ElementRange]) -> None:
        flat = flat.data  # own version counter, as in RankGroup
        own = parts[self.rank]
        found = self._gathers.exchange(self.rank, flat[own.start : own.stop], self._timeout_s)
        for part, values in zip(parts, found, strict=True):
            flat[part.start : part.stop] = values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([each.flatten() for each in self._sums.exchange(self.rank, values, self._timeout_s)])

    def close(self) -> None:
        pass
