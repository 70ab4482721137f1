"""Provides the values of a model with LoRA pairs: from the base's source, and from an adapter folder or a seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatrain_ray.engine.model.lora import B_END, is_adapter
from megatrain_ray.engine.weights.initial_values import module_seed
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.checkpoints.peft_adapter import AdapterFolder


class LoraWeights:
    """Implements WeightSource for a model with LoRA pairs.

    In a new adapter, A is what nn.Linear draws, with a seed made from its name, and B is zero. So the model computes at
    first what its base computes.
    """

    def __init__(self, base: WeightSource, model: nn.Module, seed: int, stored: AdapterFolder | None) -> None:
        """Create the source.

        model: the model with its LoRA pairs, on the meta device.
        stored: an adapter to continue from, or None.
        """
        self._base = base
        self._model = model
        self._seed = seed
        self._stored = stored

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened parameter `name`: 1-D, fp32.

        Raises as the base's source does.
        """
        if self._stored is not None and self._stored.holds(name):
            return self._stored.read(name, start, stop)
        if not is_adapter(name):
            return self._base.read(name, start, stop)
        if name.endswith(B_END):
            return torch.zeros(stop - start)
        return _initial_a(self._model.get_parameter(name).shape, name, self._seed).flatten()[start:stop]


def _initial_a(shape: torch.Size, name: str, seed: int) -> Tensor:
    """Draw the matrix as nn.Linear.reset_parameters does: uniform in ±1 ÷ √in."""
    generator = torch.Generator().manual_seed(module_seed(name.removesuffix(".weight"), seed))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
