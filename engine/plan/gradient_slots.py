"""Assigns layers' gradients to regions of device memory. Pure.

The engine and the simulation of its schedule share this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def regions_of(layers: Sequence[int], needed_bytes: Sequence[int], region_bytes: Sequence[int]) -> dict[int, int]:
    """Return the region of each layer, as an index into `region_bytes`.

    A layer takes the smallest size that holds its gradient. Layers share the regions of that size in turn, in the order
    given. So the embedding's and the head's gradient have a region to themselves where they are larger than a block's.

    needed_bytes: bytes of the gradient of each of `layers`.
    Raises ValueError for a layer whose gradient fits no region.
    """
    found: dict[int, int] = {}
    turns: dict[int, int] = defaultdict(int)
    for layer, needed in zip(layers, needed_bytes, strict=True):
        fitting = [size for size in region_bytes if size >= needed]
        if not fitting:
            raise ValueError(f"layer {layer}: a gradient of {needed} bytes, and regions of {list(region_bytes)}")
        size = min(fitting)
        alike = [index for index, other in enumerate(region_bytes) if other == size]
        found[layer] = alike[turns[size] % len(alike)]
        turns[size] += 1
    return found
