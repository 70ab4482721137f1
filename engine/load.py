"""Where a shard's first values come from: a folder of weights, or a seed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch import Tensor, nn

from megatrain_ray.engine.initial import initial_values

AHEAD_BYTES = 2 << 30  # of parameters that are drawn before they are read; a larger one is drawn alone
MAX_THREADS = 8


class WeightSource(Protocol):
    """Implemented by `io.weight_map.MappedWeights` and by `RandomSource`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: 1-D, fp32."""


class RandomSource:
    """The model's own random initialisation. A parameter is drawn by one thread, since its numbers follow from each
    other; so those that follow it in the model are drawn meanwhile by others."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """`model`: a transformers PreTrainedModel on the meta device."""
        self._model = model
        self._seed = seed
        self._names = [name for name, _ in model.named_parameters()]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="initial values")
        self._drawn: dict[str, Future[Tensor]] = {}  # the last that was read, and some that follow it

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Raises ConfigError when the model does not initialise that parameter."""
        if next(iter(self._drawn), None) != name:
            self._move_on(name)
        return self._drawn[name].result()[start:stop]

    def _move_on(self, name: str) -> None:
        """Forgets what does not follow `name`, which frees memory before others take theirs."""
        wanted = list(self._following(name))
        kept = {other: self._drawn[other] for other in wanted if other in self._drawn}
        for other, future in self._drawn.items():
            if other not in kept:
                future.cancel()
        self._drawn = {other: kept.get(other) or self._threads.submit(self._draw, other) for other in wanted}

    def _following(self, name: str) -> Iterator[str]:
        """It, and as many after it as may be drawn ahead."""
        yield name
        place = self._places.get(name, len(self._names))
        left = AHEAD_BYTES - self._num_bytes(name)
        for other in self._names[place + 1 :]:
            left -= self._num_bytes(other)
            if left < 0:
                return
            yield other

    def _num_bytes(self, name: str) -> int:
        return 4 * self._model.get_parameter(name).numel()

    def _draw(self, name: str) -> Tensor:
        return initial_values(self._model, name, self._seed).flatten()
