"""Merges LoRA pairs into a model's weights: W + alpha ÷ rank · B A, in FP32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.model.lora import A_END, B_END
from megatrain_ray.engine.weights.saved_values import SavedValues
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype


class Pair(NamedTuple):
    """Describes the LoRA pair of the module at `path`.

    a, b: shapes of the two matrices.
    transposed: whether the module's own matrix is [in, out].
    """

    path: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    transposed: bool


class MergedValues:
    """Implements ExportValues for merged weights.

    Values that the save holds are unchanged. All others come from the base, plus the product of the LoRA pair where the
    matrix has one. With bf16 training the base's W is the bf16 value that streamed.
    """

    def __init__(self, saved: SavedValues, base: WeightSource, pairs: Mapping[str, Pair], scale: float) -> None:
        """Create the merged values.

        pairs: LoRA pairs by the name of the matrix that they belong to.
        scale: factor of the product B A.
        """
        self._saved = saved
        self._base = base
        self._pairs = pairs
        self._scale = scale
        self._last: tuple[str, Tensor, Tensor] | None = None  # path, A and B: only one pair is in memory at a time

    def read(self, name: str, start: int, stop: int, dtype: ExportDtype) -> Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D.

        Raises MegatrainError for a damaged save or base.
        """
        if self._saved.holds(name):
            return self._saved.read(name, start, stop, dtype)
        values = self._base.read(name, start, stop)
        if self._saved.is_split:
            values = to_working(values).float()
        if pair := self._pairs.get(name):
            values = values + self._product(pair, start, stop)
        return to_working(values) if dtype is ExportDtype.BF16 else values

    def _product(self, pair: Pair, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened product, computed from only the rows that hold them."""
        a, b = self._matrices(pair)
        left, right = (a.T, b.T) if pair.transposed else (b, a)
        columns = right.shape[1]
        first, last = start // columns, -(-stop // columns)
        rows = (left[first:last] @ right) * self._scale
        return rows.reshape(-1)[start - first * columns : stop - first * columns]

    def _matrices(self, pair: Pair) -> tuple[Tensor, Tensor]:
        if self._last is None or self._last[0] != pair.path:
            self._last = (pair.path, self._master(pair.path + A_END, pair.a), self._master(pair.path + B_END, pair.b))
        return self._last[1:]

    def _master(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._saved.read(name, 0, math.prod(shape), ExportDtype.FP32).view(torch.Size(shape))
