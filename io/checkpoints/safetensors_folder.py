"""Reads the weights of a Hugging Face safetensors folder in parts: never a whole file or a whole parameter.

Transformers fuses experts, divides joined matrices and renames modules when it loads a model. Every tensor of a folder
is then a strided view of one parameter, or consists of views of several. A `CheckpointTensor` describes one such view;
nothing here knows the reason for it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.foreign_folders import advice_on, names_in
from megatrain_ray.io.checkpoints.quantisation import FP8_DTYPES, SCALE_ENDS, quantisation_of, with_dequantised
from megatrain_ray.io.checkpoints.stored_tensor import BUFFER_DTYPES, DTYPES, StoredTensor, TensorLocation
from megatrain_ray.read_file import parse_json, regular_file

SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
READ_ELEMENTS = 8 << 20  # elements compared at a time: 32 MiB


@dataclass(frozen=True)
class WeightFolder:
    """Gives names, shapes and values of the parameters in a folder. Every error is a ConfigError naming the file.

    prefix: name of the base model within the model. The folder may hold parameters with or without it, as Transformers
        reads them: GPT-2 on the hub has `wte.weight` for `transformer.wte.weight`.
    """

    path: Path
    _stored: Mapping[str, StoredTensor]
    prefix: str = ""

    @staticmethod
    def open(path: Path | str, prefix: str = "") -> WeightFolder:
        """Read the headers of model.safetensors, or else of the files that its index names.

        Of the two, Transformers takes the former as well: the index may be left from an older model in the folder.

        Raises ConfigError for a folder without them, and for files that are missing or damaged.
        """
        folder = Path(path)
        try:
            present = {file.name for file in folder.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{folder} is no folder; expected one with {SINGLE_NAME} or {INDEX_NAME}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {folder}: {error.strerror}") from None
        if SINGLE_NAME in present:
            return WeightFolder(folder, _dequantised(folder, _read_header(folder / SINGLE_NAME)), prefix)
        if INDEX_NAME in present:
            return WeightFolder(folder, _dequantised(folder, _read_indexed(folder / INDEX_NAME, present)), prefix)
        advice = advice_on(names_in(folder)) or "is it a model?"
        raise ConfigError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}: {advice}")

    @staticmethod
    def of_file(file: Path) -> WeightFolder:
        """Return the weights of one safetensors file. Raises ConfigError as `open`."""
        return WeightFolder(file.parent, _read_header(file))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter. Raises ConfigError if there is no such parameter."""
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor. Raises ConfigError if there is no such tensor, or if torch lacks its type."""
        return _dtype(name, self._find(name), BUFFER_DTYPES)

    def is_readable(self, name: str) -> bool:
        """Return whether torch has the type of a tensor."""
        return self._find(name).dtype in BUFFER_DTYPES

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless every named parameter is there with that shape and a type that can be read."""
        for name, shape in shapes.items():
            stored = self._find(name)
            if stored.shape != tuple(shape):
                raise ConfigError(f"{stored.file}: {name} has shape {stored.shape}, the model's has {tuple(shape)}")
            _dtype(name, stored)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D, fp32, a copy. Reads only those bytes.

        Raises ConfigError for a name or range that is not there, other types than DTYPES, and a truncated file.
        """
        _dtype(name, self._find(name))
        return self.part(name, start, stop).float()

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a flattened tensor in its stored type. Raises ConfigError as `read`."""
        stored, numel = self._find(name), self.numel(name)
        if not 0 <= start <= stop <= numel:
            raise ConfigError(f"{stored.file}: {name} has {numel} elements, expected {start} to {stop} of it")
        values = torch.empty(stop - start, dtype=self.dtype(name))
        stored.fill(values, start)
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor in its stored type and shape. Raises ConfigError as `read`."""
        return self.part(name, 0, self.numel(name)).view(self.shape(name))

    def numel(self, name: str) -> int:
        return math.prod(self.shape(name))

    def is_quantised(self, name: str) -> bool:
        return not isinstance(self._find(name), TensorLocation)

    def variants(self, names: Iterable[str]) -> set[str]:
        """Return all names under which the folder may hold tensors of these names."""
        return {known for name in names for known in self._known_as(name)}

    def holds(self, name: str) -> bool:
        return any(known in self._stored for known in self._known_as(name))

    def _known_as(self, name: str) -> tuple[str, ...]:
        return name, name.removeprefix(f"{self.prefix}."), f"{self.prefix}.{name}"

    def _find(self, name: str) -> StoredTensor:
        for known in self._known_as(name):
            if known in self._stored:
                return self._stored[known]
        raise ConfigError(f"{self.path} holds {len(self._stored)} parameters, but no {name}: is it of another model?")


def equal_values(read: Callable[[str, int, int], torch.Tensor], one: str, other: str, size: int) -> bool:
    """Return whether two parameters of `size` elements have the same values. `read` returns a range of one of them."""
    parts = ((start, min(start + READ_ELEMENTS, size)) for start in range(0, size, READ_ELEMENTS))
    return all(torch.equal(read(one, *part), read(other, *part)) for part in parts)


def weight_files(folder: Path) -> tuple[str, ...]:
    """Return the names of a folder's weight files, existing or not. Raises ConfigError for a broken index."""
    index = folder / INDEX_NAME
    if index.exists() and not (folder / SINGLE_NAME).exists():
        return tuple(sorted(set(_read_index(index).values())))
    return (SINGLE_NAME,)


def _dtype(name: str, stored: StoredTensor, allowed: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    if stored.dtype not in allowed:
        is_fp8 = stored.dtype in FP8_DTYPES
        advice = f", or FP8 with {SCALE_ENDS[0]}; use the folder of the unquantised model" if is_fp8 else ""
        expected = f"expected one of {', '.join(allowed)}{advice}"
        raise ConfigError(f"{stored.file}: {name} is of type {stored.dtype}, {expected}")
    return allowed[stored.dtype]


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = parse_json(regular_file(index).read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except OSError as error:
        raise ConfigError(f"cannot read {index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights: {type(error).__name__}: {error}") from None


def _read_indexed(index: Path, present: Set[str]) -> dict[str, TensorLocation]:
    names = _read_index(index)
    for file in names.values():
        if file not in present:
            raise ConfigError(f"{index} names {file}, which is not in its folder: download the model again")
    headers = {file: _read_header(index.parent / file) for file in sorted(set(names.values()))}
    for name, file in names.items():
        if name not in headers[file]:
            raise ConfigError(f"{index.parent / file} holds no {name}, though {index.name} says so")
    return {name: headers[file][name] for name, file in names.items()}


def _dequantised(folder: Path, stored: Mapping[str, TensorLocation]) -> Mapping[str, StoredTensor]:
    """Return the tensors as the settings of the folder's config.json say that they are quantised, if it has one."""
    try:
        config = parse_json(regular_file(folder / CONFIG_NAME).read_bytes())
    except (OSError, ValueError):
        return stored  # a folder of weights alone; who needs the settings has read them, and said what is wrong
    return with_dequantised(stored, quantisation_of(config) if isinstance(config, dict) else None)


def _read_header(path: Path) -> dict[str, TensorLocation]:
    """Locate the tensors of a file. The library checks the file, but does not say where the bytes lie."""
    try:
        with regular_file(path).open("rb") as file, safetensors.safe_open(path, framework="pt"):
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None  # the library sets no strerror
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}; download the model again") from None
    return {
        name: TensorLocation(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


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
