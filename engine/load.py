"""Where a shard's first values come from: a folder of weights, or a seed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from megatrain_ray.engine.initial import initial_values


class WeightSource(Protocol):
    """Implemented by `io.weight_map.MappedWeights` and by `RandomSource`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: 1-D, fp32."""


class RandomSource:
    """The model's own random initialisation. Holds one parameter at a time, the last that was read."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """`model`: a transformers PreTrainedModel on the meta device."""
        self._model = model
        self._seed = seed
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Raises ConfigError when the model does not initialise that parameter."""
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the memory before the next parameter takes its own
            self._last = (name, initial_values(self._model, name, self._seed).flatten())
        return self._last[1][start:stop]
