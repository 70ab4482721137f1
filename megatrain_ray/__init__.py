"""Trains language models far larger than GPU memory, exactly and in full precision, orchestrated by Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain_ray.trainer import Trainer

__all__ = ["Trainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # PEP 562: importing an io or engine module must import neither Ray nor what the trainer needs.
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("megatrain_ray.trainer").Trainer
