"""Reads the weights of a Hugging Face folder in parts: never a whole file or a whole parameter."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.foreign_folders import advice_on, names_in
from megatrain_ray.io.checkpoints.hub import HubFolder
from megatrain_ray.io.checkpoints.pickled_weights import read_pickled
from megatrain_ray.io.checkpoints.quantisation import FP8_DTYPES, SCALE_ENDS, quantisation_of, with_dequantised
from megatrain_ray.io.checkpoints.stored_tensor import BUFFER_DTYPES, DTYPES, StoredTensor, TensorLocation
from megatrain_ray.read_file import parse_json, regular_file

SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAME = "pytorch_model.bin"
FORMS = ((SINGLE_NAME, INDEX_NAME), (PICKLED_NAME, f"{PICKLED_NAME}.index.json"))
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
        """Read the headers of model.safetensors, or else of the files that its index names; or else of pickled ones.

        Transformers takes them in this order as well: an index may be left from an older model in the folder.

        Raises ConfigError for a folder without them, and for files that are missing or damaged.
        """
        folder = Path(path)
        try:
            present = {file.name for file in folder.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{folder} is no folder; expected one with {SINGLE_NAME} or {INDEX_NAME}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {folder}: {error.strerror}") from None
        for single, index in FORMS:
            if single in present:
                return WeightFolder(folder, _dequantised(folder, _read_header(folder / single)), prefix)
            if index in present:
                return WeightFolder(folder, _dequantised(folder, _read_indexed(folder / index, present)), prefix)
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
    for single, index in FORMS:
        if (folder / single).exists():
            return (single,)
        if (folder / index).exists():
            return tuple(sorted(set(_read_index(folder / index).values())))
    return (SINGLE_NAME,)


def fetch_weights(hub: HubFolder) -> None:
    """Fetch the weights of a repository whose INDEX_NAME was asked for, pickled ones if it has no others.

    Raises ConfigError if it has none, or they cannot be fetched.
    """
    if weight_files(hub.path) == (SINGLE_NAME,):
        for file in (SINGLE_NAME, *reversed(FORMS[1])):
            if not hub.add([file]) or (hub.path / file).exists():
                break
    hub.require(weight_files(hub.path))


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
    if path.suffix == ".bin":
        return read_pickled(path)
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
