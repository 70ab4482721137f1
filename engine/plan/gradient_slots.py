"""Which layer's gradient takes which region. Pure; the engine and the simulation of its schedule share it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def regions_of(layers: Sequence[int], needed_bytes: Sequence[int], region_bytes: Sequence[int]) -> dict[int, int]:
    """Layer → index of a region: layers take the smallest that hold them in turn, in the order given. `needed_bytes`:
    of each of these layers.

    So the embedding's and the head's gradient, where they are larger than a block's, have a region to themselves.
    Raises ValueError for a layer that fits none.
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
