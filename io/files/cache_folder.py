"""Where what can be made again is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """This package's folder in the user's cache: `$XDG_CACHE_HOME`, or ~/.cache where that is unset or, as its
    specification says, relative. The hub's files lie beside it, in huggingface_hub's own.

    Raises RuntimeError where there is no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "megatrain-ray"
