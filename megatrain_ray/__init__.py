"""Trains language models far larger than GPU memory, exactly and in full precision, orchestrated by Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain_ray.config.schema import TrainConfig
    from megatrain_ray.config.yaml_file import load_config
    from megatrain_ray.trainer import Trainer

__all__ = ["TrainConfig", "Trainer", "__version__", "load_config"]
__version__ = "0.1.0"

_MODULES = {"TrainConfig": "config.schema", "Trainer": "trainer", "load_config": "config.yaml_file"}


def __getattr__(name: str) -> Any:
    # PEP 562: importing an io or engine module must import neither Ray nor what the trainer needs.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatrain_ray.{_MODULES[name]}"), name)
