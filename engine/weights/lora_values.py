"""Provides values of a model with LoRA pairs: for the start of a run, and merged into the model's weights.

A run starts from the base's source, and from an adapter folder or a seed. The merged weights are
W + alpha ÷ rank · B A, in FP32, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.model.lora import A_END, B_END, is_adapter, is_transposed, module_of
from megatrain_ray.engine.weights.initial_values import module_seed
from megatrain_ray.engine.weights.saved_values import ExportValues
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.checkpoints.peft_adapter import AdapterFolder
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype


class LoraWeights:
    """Implements WeightSource for a model with LoRA pairs.

    In a new adapter, A is what nn.Linear draws, with a seed made from its name, and B is zero. So the model computes at
    first what its base computes.
    """

    def __init__(self, base: WeightSource, model: nn.Module, seed: int, stored: AdapterFolder | None) -> None:
        """Create the source for `model`: LoRA pairs included, on the meta device. `stored`: adapter to continue."""
        self._base = base
        self._model = model
        self._seed = seed
        self._stored = stored

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D, fp32. Raises as the base's source does."""
        if self._stored is not None and self._stored.holds(name):
            return self._stored.read(name, start, stop)
        if not is_adapter(name):
            return self._base.read(name, start, stop)
        if name.endswith(B_END):
            return torch.zeros(stop - start)
        # As nn.Linear.reset_parameters does: uniform in ±1 ÷ √in.
        generator = torch.Generator().manual_seed(module_seed(name.removesuffix(".weight"), self._seed))
        a = torch.empty(self._model.get_parameter(name).shape)
        return nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator).flatten()[start:stop]


class Pair(NamedTuple):
    """Describes the LoRA pair of the module at `path`."""

    path: str
    a: tuple[int, ...]  # shape of the matrix
    b: tuple[int, ...]
    transposed: bool  # whether the module's own matrix is [in, out]


def pairs_of(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> dict[str, Pair]:
    """Return the LoRA pairs by the name of their matrix.

    shapes: of a model's parameters by name, adapters included.
    model: the same without LoRA pairs, on the meta device.
    """
    paths = [module_of(name) for name in shapes if name.endswith(A_END)]
    return {
        f"{path}.weight": Pair(
            path, shapes[path + A_END], shapes[path + B_END], is_transposed(model.get_submodule(path))
        )
        for path in paths
    }


class HeldValues(ExportValues, Protocol):
    """Provides the values of an export, of the parameters that it holds."""

    is_split: bool  # working copies are bf16

    def holds(self, name: str) -> bool: ...


class MergedValues:
    """Implements ExportValues for merged weights.

    Values that `saved` holds are unchanged, except for matrices with a LoRA pair. These and all others come from the
    base, plus the product of the pair. With bf16 training the base's W is the value that streamed, bf16 except for
    parameters in `fp32`.
    """

    def __init__(
        self, saved: HeldValues, base: WeightSource, pairs: Mapping[str, Pair], scale: float,
        fp32: Set[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Create the merged values. `pairs`: by the name of their matrix. `scale`: factor of B A."""
        self._saved = saved
        self._base = base
        self._pairs = pairs
        self._scale = scale
        self._fp32 = fp32
        self._last: tuple[str, Tensor, Tensor] | None = None  # path, A and B: only one pair is in memory at a time

    def read(self, name: str, start: int, stop: int, dtype: ExportDtype) -> Tensor:
        """Return elements [start, stop) of the flattened parameter. Raises MegatrainError for damaged sources."""
        pair = self._pairs.get(name)
        if pair is None and self._saved.holds(name):
            return self._saved.read(name, start, stop, dtype)
        values = self._base.read(name, start, stop)
        if self._saved.is_split and name not in self._fp32:
            values = to_working(values).float()
        if pair is not None:
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
