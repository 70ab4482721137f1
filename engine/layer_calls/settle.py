"""Copies tensors that outlive a layer's work out of the memory of that work.

Micro-batches that visit a layer in turn leave outputs and gradients of inputs, which later visits read. The allocator
puts them among the temporary tensors of the work. What is free between them is then too small for the largest tensors
of the next visit. So 7.6B within 10 GB made torch's allocator give memory back 95 times a step, and each time it waited
for the GPU (benchmarks/history.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Copy = Callable[[torch.Tensor], torch.Tensor]


def settled(values: Sequence[Any], given: Iterable[Any], copy: Copy) -> list[Any]:
    """Return the values, with floating-point tensors whose memory nothing else shares replaced by copies.

    given: what the work was given. A tensor that shares memory with it, or with another value, stays.
    """
    values = list(values)
    num_sharing = Counter(_storage(value) for value in (*given, *values) if isinstance(value, torch.Tensor))
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if num_sharing[_storage(value)] == 1 and value.untyped_storage().nbytes() == value.nbytes:
            values[i] = copy(value.detach())
    return values


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
