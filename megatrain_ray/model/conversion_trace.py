"""Follows the elements of a model's tensors through Transformers' conversion to a checkpoint, on the meta device.

Such a conversion moves elements: it renames, divides, joins, transposes and interleaves. A tensor that was made by a
copy or by joining is traced back to where its elements were. What was computed in another way leads nowhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, Within, row_major


class _Joined(NamedTuple):
    """Describes a tensor that `torch.cat` made: every `period` elements, each source has those from `start` to `stop`.

    The sources are contiguous.
    """

    period: int
    sources: Sequence[tuple[int, int, torch.Tensor]]


@dataclass(frozen=True)
class _Region:
    """Says which elements of a storage some elements of a written tensor are. All have the same `shape`."""

    shape: tuple[int, ...]
    written: Within
    storage: int
    offset: int
    stride: tuple[int, ...]

    def narrow(self, dim: int, start: int, stop: int) -> _Region:
        """Return the part with indices [start, stop) of a dimension."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        written = self.written._replace(offset=self.written.offset + start * self.written.stride[dim])
        return replace(self, shape=shape, written=written, offset=self.offset + start * self.stride[dim])


class ConversionTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies and joins of tensors within its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, torch.Tensor | _Joined] = {}  # by storage: the view that it is a copy of, or its sources
        self._kept: list[Any] = []  # storages are told by their identity, so none may be freed

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        aten = torch.ops.aten
        if func is aten.clone.default and result.is_contiguous():
            self._made[_storage(result)] = args[0]
        elif func in (aten.cat.default, aten.stack.default):
            dim = (args[1] if len(args) > 1 else 0) % result.dim()
            parts = [part.unsqueeze(dim) if func is aten.stack.default else part for part in args[0]]
            inner = math.prod(result.shape[dim + 1 :])
            ends = [0]
            for part in parts:
                ends.append(ends[-1] + part.shape[dim] * inner)
            sources = [(a, b, part.contiguous()) for a, b, part in zip(ends, ends[1:], parts, strict=False)]
            for (_, _, source), part in zip(sources, parts, strict=True):
                if source is not part:
                    self._made.setdefault(_storage(source), part)
            self._made[_storage(result)] = _Joined(ends[-1], sources)
        self._kept.append((args, result))
        return result

    def pieces(
        self, name: str, written: torch.Tensor, owners: Mapping[int, str]
    ) -> Iterator[tuple[str, CheckpointTensor]]:
        """Yield the owners of the elements of a written tensor, each with the elements that are its own.

        owners: names of tensors of the model, by storage.
        """
        shape = tuple(written.shape)
        whole = Within(shape, 0, row_major(shape))
        region = _Region(shape, whole, _storage(written), int(written.storage_offset()), written.stride())
        for found in self._roots(region, owners):
            is_all = found.written == Within(shape, 0, row_major(found.shape)) and found.shape == shape
            within = None if is_all else found.written
            yield owners[found.storage], CheckpointTensor(name, found.shape, found.offset, found.stride, within)

    def _roots(self, region: _Region, owners: Mapping[int, str]) -> Iterator[_Region]:
        """Yield the parts of a region in storages of the model."""
        made = self._made.get(region.storage)
        if region.storage in owners:
            yield region
        elif isinstance(made, _Joined):
            yield from self._of_joined(region, made, owners)
        elif made is not None and (source := _in_copied(region, made)):
            yield from self._roots(source, owners)

    def _of_joined(self, region: _Region, joined: _Joined, owners: Mapping[int, str]) -> Iterator[_Region]:
        start = region.offset % joined.period
        inner = [k for k, stride in enumerate(region.stride) if stride % joined.period and region.shape[k] > 1]
        stop = start + sum((region.shape[k] - 1) * region.stride[k] for k in inner) + 1
        for first, last, source in joined.sources:
            if first <= start and stop <= last:
                size, period = last - first, joined.period
                stride = tuple(s if s % period else s // period * size for s in region.stride)
                offset = region.offset // period * size + start - first + int(source.storage_offset())
                yield from self._roots(replace(region, storage=_storage(source), offset=offset, stride=stride), owners)
                return
        if not inner:
            return
        dim = max(inner, key=lambda k: region.stride[k])
        step, length = region.stride[dim], region.shape[dim]
        ends = {-(-(last - start) // step) for _, last, _ in joined.sources}
        cuts = sorted({0, length, *(end for end in ends if 0 < end < length)})
        cuts = cuts if len(cuts) > 2 else list(range(length + 1))
        for a, b in itertools.pairwise(cuts):
            yield from self._of_joined(region.narrow(dim, a, b), joined, owners)


def _in_copied(region: _Region, view: torch.Tensor) -> _Region | None:
    """Return where the elements of a region of a contiguous copy are in the `view` that was copied.

    None: some dimension of the region is no run of whole dimensions of the view.
    """
    steps, index, rest = row_major(view.shape), [], region.offset
    for step in steps:
        index.append(rest // step)  # at last the largest index of the region
        rest %= step
    offset = int(view.storage_offset()) + sum(i * s for i, s in zip(index, view.stride(), strict=True))
    dims: list[tuple[int, int, int]] = []  # size, stride in what is written, stride in the view's storage
    for size, written, stride in zip(region.shape, region.written.stride, region.stride, strict=True):
        inner: list[tuple[int, int, int]] = []
        while size > 1:
            k = next(k for k, step in enumerate(steps) if view.shape[k] > 1 and step <= stride)
            factor = stride // steps[k]
            if stride % steps[k]:
                return None
            if index[k] + (size - 1) * factor < view.shape[k]:
                index[k] += (size - 1) * factor
                inner.append((size, written, factor * view.stride(k)))
                break
            if factor > 1 or index[k] or size % view.shape[k]:
                return None
            inner.append((view.shape[k], written, view.stride(k)))
            index[k] = view.shape[k] - 1
            length = view.shape[k]
            size, written, stride = size // length, written * length, stride * length
        dims += reversed(inner)
    shape, of_written, of_view = zip(*dims, strict=True) if dims else ((), (), ())
    return _Region(shape, region.written._replace(stride=of_written), _storage(view), offset, of_view)


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
