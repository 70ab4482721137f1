"""Where a shard's first values come from: a folder of weights, or a seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from megatrain_ray.engine.weights.initial_values import initial_values, module_seed, normals_before


class WeightSource(Protocol):
    """Implemented by `io.checkpoints.weight_map.MappedWeights` and by `RandomSource`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: 1-D, fp32, until the thread reads others. Threads
        may read at the same time."""


class RandomSource:
    """The model's own random initialisation.

    The numbers of a parameter follow from each other, so each thread that reads draws parameters of its own; it holds
    some MiB of one that is filled with normal numbers, as nearly all are, and any other one whole.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        """`model`: a transformers PreTrainedModel on the meta device."""
        self._model = model
        self._seed = seed
        self._of_thread = threading.local()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Fastest for one parameter after the other, each from its beginning on. Raises ConfigError when the model does
        not initialise that parameter."""
        drawn: _Drawn | None = getattr(self._of_thread, "drawn", None)
        if drawn is None or drawn.name != name or start < drawn.start:
            self._of_thread.drawn = drawn = None  # before another one takes memory
            self._of_thread.drawn = drawn = _Drawn(name, self._parts(name))
        return drawn.read(start, stop)

    def _parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Of the flattened parameter, and where each begins: each until the next one."""
        normals = normals_before(self._model, name)
        if normals is None:
            yield 0, initial_values(self._model, name, self._seed).flatten()
            return
        generator = torch.Generator().manual_seed(module_seed(name.rpartition(".")[0], self._seed))
        for other in normals[:-1]:
            for _ in other.blocks(generator):
                pass
        yield from normals[-1].blocks(generator)


class _Drawn:
    """A parameter as far as it is drawn, the last part of it at hand."""

    def __init__(self, name: str, parts: Iterator[tuple[int, Tensor]]) -> None:
        self.name = name
        self._parts = parts
        self.start, self._part = next(parts)

    def read(self, start: int, stop: int) -> Tensor:
        """From `self.start` on, and with what follows after that."""
        found: list[Tensor] = []
        while True:
            held = self._part[max(0, start - self.start) : max(0, stop - self.start)]
            if self.start + len(self._part) >= stop:
                return torch.cat([*found, held]) if found else held
            found += [held.clone()] * bool(len(held))
            self.start, self._part = next(self._parts)
