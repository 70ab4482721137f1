"""Provides the initial values of a shard's weights: from a folder of weights, or from a seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from megatrain_ray.engine.weights.initial_values import initial_values, module_seed, normals_before


class WeightSource(Protocol):
    """Provides initial values; implemented by `io.checkpoints.weight_map.MappedWeights` and by `RandomSource`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened parameter `name`: 1-D, fp32.

        The tensor is valid until the calling thread reads others. Several threads may read at the same time.
        """


class RandomSource:
    """Draws values by the model's own random initialization.

    The numbers of a parameter are drawn in sequence, so each reading thread draws its own parameters. It holds a few
    MiB of a parameter that is filled with normal numbers, as nearly all are, and any other parameter as a whole.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        """Create the source.

        model: a transformers PreTrainedModel on the meta device.
        """
        self._model = model
        self._seed = seed
        self._of_thread = threading.local()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened parameter `name`: 1-D, fp32.

        It is fastest to read one parameter after the other, each from its beginning on. Raises ConfigError if the model
        does not initialize that parameter.
        """
        drawn: _Drawn | None = getattr(self._of_thread, "drawn", None)
        if drawn is None or drawn.name != name or start < drawn.start:
            self._of_thread.drawn = drawn = None  # free it before another one is allocated
            self._of_thread.drawn = drawn = _Drawn(name, self._parts(name))
        return drawn.read(start, stop)

    def _parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield parts of the flattened parameter, each with its first element's index.

        A part is valid until the next one.
        """
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
    """Holds a parameter that is drawn as far as it was read, with only the last part in memory."""

    def __init__(self, name: str, parts: Iterator[tuple[int, Tensor]]) -> None:
        self.name = name
        self._parts = parts
        self.start, self._part = next(parts)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), drawing further parts as needed.

        `start` must not be less than `self.start`.
        """
        found: list[Tensor] = []
        while True:
            held = self._part[max(0, start - self.start) : max(0, stop - self.start)]
            if self.start + len(self._part) >= stop:
                return torch.cat([*found, held]) if found else held
            found += [held.clone()] * bool(len(held))
            self.start, self._part = next(self._parts)
