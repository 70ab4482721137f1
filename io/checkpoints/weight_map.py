"""Reads parameters whose elements a checkpoint holds under other names, in pieces, or in another order.

Transformers fuses experts, divides joined matrices and renames modules when it loads a model. Every tensor of a folder
is then a strided view of one parameter, or consists of views of several. A `CheckpointTensor` describes one such view;
nothing here knows the reason for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder


class Within(NamedTuple):
    """Says where some elements lie in a tensor of `shape`: a view of it, flattened, with `offset` and `stride`."""

    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first to the last of a view."""
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1


@dataclass(frozen=True)
class CheckpointTensor:
    """Describes elements of a parameter that the checkpoint's tensor `name` holds.

    offset, stride: of these elements as a view of `shape` of the flattened parameter.
    within: the same of the checkpoint's tensor; None: they are all of it, in its order.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    within: Within | None = None

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> CheckpointTensor:
        """Return the description of a tensor that holds a parameter unchanged."""
        return CheckpointTensor(name, shape, 0, row_major(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Return the index in the parameter one beyond the last element."""
        return self.offset + _extent(self.shape, self.stride)

    @property
    def place(self) -> Within:
        """Return where the elements lie in the checkpoint's tensor."""
        return self.within or Within(self.shape, 0, row_major(self.shape))

    @property
    def is_contiguous(self) -> bool:
        """Return whether the tensor holds these elements alone, in the parameter's own order."""
        expected = row_major(self.shape)
        in_order = all(n == 1 or s == e for n, s, e in zip(self.shape, self.stride, expected, strict=True))
        return in_order and self.within is None

    def rows(self, start: int, stop: int) -> CheckpointTensor:
        """Return the rows of `shape` that hold elements [start, stop) of the parameter, and perhaps others near."""
        if not self.shape or self.stride[0] < _extent(self.shape[1:], self.stride[1:]):
            return self  # rows overlap in the parameter
        first = max(0, (start - self.offset) // self.stride[0])
        last = min(self.shape[0], -(-(stop - self.offset) // self.stride[0]))
        place = self.place
        shape, offset = (last - first, *self.shape[1:]), self.offset + first * self.stride[0]
        within = place._replace(offset=place.offset + first * place.stride[0])
        return CheckpointTensor(self.name, shape, offset, self.stride, within)


# By parameter. One that is stored under its own name is left out. One that cannot be read in pieces has no tensors.
WeightMap = Mapping[str, Sequence[CheckpointTensor]]


@dataclass(frozen=True)
class MappedWeights:
    """Reads parameters and buffers of a model from a folder, under the model's own names or a checkpoint's names."""

    folder: WeightFolder
    map: WeightMap

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless every parameter is there, whole and of its shape."""
        for name, shape in shapes.items():
            self.folder.check({t.name: t.place.shape for t in self._readable(name)} or {name: shape})

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D, fp32. Raises as WeightFolder.read."""
        tensors = self._readable(name)
        if not tensors:
            return self.folder.read(name, start, stop)
        values = torch.empty(stop - start)
        for tensor in tensors:
            if max(start, tensor.offset) < min(stop, tensor.stop):
                self._fill(values, start, tensor)
        return values

    def holds(self, name: str) -> bool:
        return all(map(self.folder.holds, self._stored_names(name)))

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a buffer of this shape in its stored type; None if the folder has none. Raises ConfigError as `read`.

        One that the folder holds in another shape is returned in that.
        """
        if not self.holds(name):
            return None
        tensors = self._tensors(name)
        if all(tensor.within is None for tensor in tensors):
            return self.folder.whole(self._stored_names(name)[0])
        values = torch.empty(math.prod(shape), dtype=self.folder.dtype(tensors[0].name))
        for tensor in tensors:
            self._fill(values, 0, tensor)
        return values.view(shape)

    def _stored_names(self, name: str) -> list[str]:
        return [tensor.name for tensor in self._tensors(name)] or [name]

    def _tensors(self, name: str) -> Sequence[CheckpointTensor]:
        return () if self.folder.holds(name) else self.map.get(name, ())

    def _readable(self, name: str) -> Sequence[CheckpointTensor]:
        tensors = self._tensors(name)
        if not tensors and name in self.map and not self.folder.holds(name):
            raise ConfigError(
                f"{self.folder.path} holds no {name}; models of this type are published with other values, from which "
                "Transformers computes it: load the model with Transformers and write it by "
                "save_pretrained(FOLDER, save_original_format=False)"
            )
        return tensors

    def _fill(self, values: torch.Tensor, start: int, tensor: CheckpointTensor) -> None:
        """Set those of `values`, the parameter's elements from `start` on, that the tensor holds."""
        stop = start + len(values)
        if tensor.is_contiguous:
            first, last = max(start, tensor.offset), min(stop, tensor.stop)
            values[first - start : last - start] = self.folder.part(
                tensor.name, first - tensor.offset, last - tensor.offset
            )
            return
        part = tensor.rows(start, stop)
        first, last = max(start, part.offset), min(stop, part.stop)
        if first >= last:  # these elements lie between rows, where another tensor's are
            return
        shape, stride, place = part.shape, part.stride, part.place
        stored = self.folder.part(part.name, place.offset, place.offset + _extent(shape, place.stride))
        around = torch.empty(part.stop - part.offset, dtype=values.dtype)
        of_both = slice(first - start, last - start), slice(first - part.offset, last - part.offset)
        around[of_both[1]] = values[of_both[0]]  # what other tensors hold between these elements
        around.as_strided(shape, stride).copy_(stored.as_strided(shape, place.stride))
        values[of_both[0]] = around[of_both[1]]


def is_covered(numel: int, tensors: Sequence[CheckpointTensor]) -> bool:
    """Return whether the tensors hold as many elements as a parameter has. A conversion gives none of them twice."""
    return sum(tensor.numel for tensor in tensors) == numel
