"""Maps parameters to the tensors of a checkpoint where names or shapes differ.

Transformers fuses experts and renames modules when it loads a model. Every checkpoint tensor is then a strided view of
one parameter. A `CheckpointTensor` describes that view; nothing here knows the reason for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder


@dataclass(frozen=True)
class CheckpointTensor:
    """Describes which elements of a parameter the checkpoint's tensor `name` holds.

    offset, stride: of the tensor as a view of the flattened parameter, in elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> CheckpointTensor:
        """Return the description of a tensor that holds a parameter unchanged."""
        return CheckpointTensor(name, shape, 0, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Return the index in the parameter one beyond the tensor's last element."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) + 1

    @property
    def is_dense(self) -> bool:
        """Return whether the tensor holds all elements from `offset` to `stop`, in any order."""
        return self.stop - self.offset == self.numel

    @property
    def is_contiguous(self) -> bool:
        """Return whether the tensor holds its elements in the parameter's own order."""
        expected = CheckpointTensor.whole(self.name, self.shape).stride
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.stride, expected, strict=True))


WeightMap = Mapping[str, Sequence[CheckpointTensor]]  # by parameter; one stored under its own name is left out


@dataclass(frozen=True)
class MappedWeights:
    """Reads the parameters of a model from a folder that holds them under its own names or a checkpoint's names."""

    folder: WeightFolder
    map: WeightMap

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless every parameter is there, whole and of its shape."""
        for name, shape in shapes.items():
            self.folder.check({t.name: t.shape for t in self._tensors(name)} or {name: shape})

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D, fp32. Raises as WeightFolder.read."""
        tensors = self._tensors(name)
        if not tensors:
            return self.folder.read(name, start, stop)
        values = torch.empty(stop - start)
        for tensor in tensors:
            first, last = max(start, tensor.offset), min(stop, tensor.stop)
            if first < last:
                values[first - start : last - start] = self._part(tensor, first - tensor.offset, last - tensor.offset)
        return values

    def _tensors(self, name: str) -> Sequence[CheckpointTensor]:
        return () if name in self.folder.names else self.map.get(name, ())

    def _part(self, tensor: CheckpointTensor, start: int, stop: int) -> torch.Tensor:
        if tensor.is_contiguous:
            return self.folder.read(tensor.name, start, stop)
        stored = self.folder.read(tensor.name, 0, tensor.numel).view(tensor.shape)
        whole = torch.empty(tensor.numel)
        whole.as_strided(tensor.shape, tensor.stride).copy_(stored)
        return whole[start:stop]


def check_covered(name: str, numel: int, tensors: Sequence[CheckpointTensor]) -> None:
    """Raise ConfigError unless the tensors hold every element of the parameter exactly once."""
    position = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if not tensor.is_dense or tensor.offset != position:
            raise ConfigError(f"{name}: {tensor.name} of its checkpoints is no piece of it that can be read on its own")
        position = tensor.stop
    if position != numel:
        raise ConfigError(f"{name} has {numel} elements, its checkpoints hold {position} of them")
