"""Writes a Hugging Face folder of weights with only one part of one tensor in memory at a time.

safetensors' own writer needs a whole file in memory, but the format is simple enough to be written piece by piece: the
length of a JSON header (8 bytes, little-endian), the header, then the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, READ_ELEMENTS, SINGLE_NAME, WeightFolder
from megatrain_ray.io.checkpoints.stored_tensor import BUFFER_DTYPES
from megatrain_ray.io.files.disk_errors import check_room
from megatrain_ray.io.files.partial_folder import complete_or_absent

FILE_BYTES = 5 * 10**9  # largest file that every hub and file system accepts
REST_BYTES = 32 << 20  # upper bound on everything except the weights, such as the tokenizer
FLUSH_BYTES = 256 << 20  # bytes written between two flushes to disk
HEADER_NAMES = {dtype: name for name, dtype in BUFFER_DTYPES.items()}  # names of types in a header of safetensors


class ExportDtype(Enum):
    """Names the type of the exported weights as on the command line."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def torch(self) -> torch.dtype:
        return torch.bfloat16 if self is ExportDtype.BF16 else torch.float32


class ExportTensor(NamedTuple):
    """Describes a tensor to write.

    chunks: yields its bytes, row-major and little-endian; called when the tensor is written.
    """

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def copied(folder: WeightFolder, name: str, dtype: ExportDtype) -> ExportTensor:
    """Return a tensor of another folder, to be written as it is there. A quantised one is dequantised to `dtype`."""
    written = dtype.torch if folder.is_quantised(name) else folder.dtype(name)
    return ExportTensor(name, folder.shape(name), partial(_copy, folder, name, written), written)


def _copy(folder: WeightFolder, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
    numel = folder.numel(name)
    for start in range(0, numel, READ_ELEMENTS):
        part = folder.part(name, start, min(start + READ_ELEMENTS, numel)).to(dtype)
        yield part.view(torch.uint8).numpy().data


def write_model_folder(
    out_dir: Path, tensors: Sequence[ExportTensor], dtype: ExportDtype, config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES, copies: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Write config.json, the weights, their index if there are several files, and copies of other files.

    file_bytes: size of a weight file at most; a larger tensor has a file of its own.

    The folder appears when it is complete. Raises ConfigError unless `out_dir` is new or empty, CapacityError if there
    is no room for the weights, MegatrainError if writing fails.
    """
    # Before Transformers 4.56 the key dtype was called torch_dtype. Only one may remain, as they could contradict.
    described = {k: v for k, v in config.items() if k != "torch_dtype"}
    described["dtype"] = str(dtype.torch).removeprefix("torch.")
    settings: dict[str, Mapping[str, Any]] = {"config.json": described}
    if generation_config is not None:
        settings["generation_config.json"] = generation_config
    files = _split(tensors, file_bytes)
    names = [f"model-{k:05}-of-{len(files):05}.safetensors" for k in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SINGLE_NAME]
    else:
        weight_map = {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file}
        total = sum(tensor.nbytes for tensor in tensors)
        settings[INDEX_NAME] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_folder(out_dir, settings, dict(zip(names, files, strict=True)), copies)


def write_folder(
    out_dir: Path, settings: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Sequence[ExportTensor]],
    copies: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Write JSON files and safetensors files by name, and copies of files and folders. Raises as write_model_folder."""
    with complete_or_absent(out_dir) as folder:
        for name, values in settings.items():
            (folder / name).write_text(json.dumps(values, indent=2) + "\n")
        num_bytes = sum(tensor.nbytes for tensors in weights.values() for tensor in tensors)
        check_room(folder, num_bytes + REST_BYTES, "the exported model", "free some, or name another folder")
        for file in copies:
            if file.is_dir():
                shutil.copytree(file, folder / file.name)
            else:
                shutil.copy(file, folder)
        for name, tensors in weights.items():
            _write_safetensors(folder / name, tensors)


def _split(tensors: Sequence[ExportTensor], file_bytes: int) -> list[list[ExportTensor]]:
    """Divide the tensors among files, in order, as many to a file as fit."""
    files: list[list[ExportTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files


def _write_safetensors(path: Path, tensors: Sequence[ExportTensor]) -> None:
    with path.open("wb") as file:
        file.write(_header(tensors))
        unflushed = 0
        for tensor in tensors:
            written = 0
            for chunk in tensor.chunks():
                written += file.write(chunk)
                unflushed += len(chunk)
                if unflushed >= FLUSH_BYTES:
                    _flush(file)
                    unflushed = 0
            if written != tensor.nbytes:
                raise MegatrainError(f"{tensor.name}: expected {tensor.nbytes} bytes to export, got {written}")
        _flush(file)


def _header(tensors: Sequence[ExportTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Transformers refuses a file without it
    offset = 0
    for tensor in tensors:
        end, dtype = offset + tensor.nbytes, HEADER_NAMES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _flush(file: BinaryIO) -> None:
    """Flush to disk and drop from the page cache, where the bytes would take memory from a training."""
    file.flush()
    os.fdatasync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
