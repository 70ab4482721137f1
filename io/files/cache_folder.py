"""Locates the cache for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return this package's folder in the user's cache: $XDG_CACHE_HOME if that is absolute, else ~/.cache.

    Raises RuntimeError if the user has no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "megatrain-ray"
