"""Counts the bytes of tensors that there are at the same time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of storages that there are."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}
        for tensor in given:
            self._count(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, storage._cdata)
            self.most = max(self.most, sum(self._sizes.values()))
