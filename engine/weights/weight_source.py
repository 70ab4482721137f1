"""Provides the initial values of a shard's weights: from a folder of weights, or from a seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatrain_ray.engine.weights.initial_values import Fill, fills_up_to, initial_values, module_seed


class WeightSource(Protocol):
    """Provides initial values; implemented by `io.checkpoints.weight_map.MappedWeights` and by `RandomSource`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened parameter `name`: 1-D, fp32.

        The tensor is valid until the calling thread reads others. Several threads may read at the same time.
        """


class RandomSource:
    """Draws values by the model's own random initialization.

    The numbers of a parameter are drawn in sequence, so each reading thread draws its own parameters. It holds a few
    MiB of a parameter that is filled with normal numbers or a constant, as nearly all are, and any other parameter as a
    whole.
    """

    def __init__(self, values: nn.Module | Mapping[str, Sequence[Fill]], seed: int) -> None:
        """Create the source.

        values: what `fills_of` found of the model, or a transformers PreTrainedModel on the meta device.
        """
        self._values = values
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
        """Yield parts of the flattened parameter, each valid until the next, with the index of its first element."""
        values = self._values
        fills = fills_up_to(values, name) if isinstance(values, nn.Module) else values[name]
        if fills is None:
            assert isinstance(values, nn.Module)
            yield 0, initial_values(values, name, self._seed).flatten()
            return
        generator = torch.Generator().manual_seed(module_seed(name.rpartition(".")[0], self._seed))
        for other in fills[:-1]:
            for _ in other.blocks(generator):
                pass
        yield from fills[-1].blocks(generator)


@dataclass(frozen=True)
class WithNew:
    """Implements WeightSource for weights that lack the parameter `name`, which `drawn` provides."""

    stored: WeightSource
    name: str
    drawn: WeightSource

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return (self.drawn if name == self.name else self.stored).read(name, start, stop)


class _Drawn:
    """Holds a parameter that is drawn as far as it was read, with only the last part in memory."""

    def __init__(self, name: str, parts: Iterator[tuple[int, Tensor]]) -> None:
        self.name = name
        self._parts = parts
        self.start, self._part = next(parts)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), drawing further parts as needed. `start` must not be below `self.start`."""
        found: list[Tensor] = []
        while True:
            held = self._part[max(0, start - self.start) : max(0, stop - self.start)]
            if self.start + len(self._part) >= stop:
                return torch.cat([*found, held]) if found else held
            found += [held.clone()] * bool(len(held))
            self.start, self._part = next(self._parts)
