"""Disables garbage collection where it would only visit objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection in the block.

    Collections would visit everything that importing PyTorch and Transformers has created, which stays anyway. With
    them the imports of a GPU worker took 3.3 s, without 2.6 s, and planning 180 layers took a quarter longer.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
