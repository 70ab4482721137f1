"""Implements splitmix64 (Steele, Lea, Flood 2014), an integer hash that does not change with any library's version."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1

Bits = TypeVar("Bits", int, NDArray[np.uint64])


def splitmix64(value: Bits) -> Bits:
    """Return a hash of a Python int in [0, 2^64), or of each element of a uint64 array. It is a bijection."""
    z: Any = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return cast(Bits, z ^ (z >> 31))


def splitmix64_chain(*values: int) -> int:
    """Return one hash of several integers, in order: h = splitmix64(h ^ value) from h = 0, each taken modulo 2^64."""
    h = 0
    for value in values:
        h = splitmix64(h ^ (value & MASK))
    return h
