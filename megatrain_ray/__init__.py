"""Trains language models far larger than GPU memory, exactly and in full precision, orchestrated by Ray."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain_ray.trainer import Trainer

__all__ = ["Trainer", "__version__"]
__version__ = "0.1.0"


def _share_cores(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads of OpenMP sleep after a short while, unless the user has said how they wait.

    By default they spin for milliseconds, on cores that other threads need: a step of examples/tiny_llama.yaml took
    3.7 s on two busy cores, and 0.65 s without. Not spinning at all costs 12 % on idle cores, and 1000 turns nothing.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")


_share_cores(os.environ)  # before torch is imported, for this process and those that it starts


def __getattr__(name: str) -> Any:
    # PEP 562: importing an io or engine module must import neither Ray nor what the trainer needs.
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("megatrain_ray.trainer").Trainer
