"""Locates tensors in a file of torch.save, which holds their names pickled and their bytes as they are."""

from __future__ import annotations

import zipfile
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.stored_tensor import BUFFER_DTYPES, TensorLocation
from megatrain_ray.read_file import regular_file

NAMES = {dtype: name for name, dtype in BUFFER_DTYPES.items()}
SAVE_AGAIN = "load it with Transformers and save_pretrained(FOLDER)"


def read_pickled(path: Path) -> dict[str, TensorLocation]:
    """Locate the tensors of a file without reading them. torch's restricted unpickler runs no code of the file.

    Raises ConfigError for a file that is no such file, is of torch before 1.6, or whose tensors are no plain ranges.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes seconds: only where weights are pickled

    try:
        with zipfile.ZipFile(regular_file(path)) as file:
            records = sorted(file.infolist(), key=_start)
            is_plain = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            orders = [file.read(record) for record in records if record.filename.endswith("/byteorder")]
        if not is_plain or orders not in ([], [b"little"]):  # torch crashes as it swaps bytes without having them
            raise _not_plain(path)
        with FakeTensorMode():
            held = torch.load(path, weights_only=True, map_location="cpu")
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # of the unpickler, which may raise anything
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is damaged, or not of torch.save since torch 1.6: {reason}; {SAVE_AGAIN}") from None
    tensors = held if isinstance(held, dict) else {}
    if not tensors or not all(_is_range(tensor, records) for tensor in tensors.values()):
        raise _not_plain(path)
    return {str(name): _location(path, tensor) for name, tensor in tensors.items()}


def _not_plain(path: Path) -> ConfigError:
    return ConfigError(f"{path} holds not only tensors that lie in it as they are; {SAVE_AGAIN}")


def _start(record: zipfile.ZipInfo) -> int:
    return record.header_offset


def _is_range(value: object, records: Sequence[zipfile.ZipInfo]) -> bool:
    """Return whether a value is a tensor whose elements lie in the file, one after the other and as they are.

    records: of the file, by position.
    """
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.is_neg() or value.is_conj():
        return False
    storage = value.untyped_storage()
    begin: int | None = getattr(storage, "_checkpoint_offset", None)
    if begin is None:  # it was saved on the meta device
        return False
    if records[bisect_left(records, begin, key=_start) - 1].file_size != storage.nbytes():  # as torch checks it
        return False
    end = (value.storage_offset() + value.numel()) * value.itemsize
    return value.storage_offset() >= 0 and end <= storage.nbytes()


def _location(path: Path, tensor: torch.Tensor) -> TensorLocation:
    begin: int = getattr(tensor.untyped_storage(), "_checkpoint_offset")  # noqa: B009  # as torch.load documents
    start = begin + int(tensor.storage_offset()) * tensor.itemsize
    return TensorLocation(path, start, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
