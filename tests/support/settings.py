"""The smallest configuration there is, and changes of it by dotted key."""

from __future__ import annotations

from typing import Any

from megatrain_ray.config.schema import TrainConfig

MISSING = object()


def settings(**changes: Any) -> dict[str, Any]:
    """Plain data; `train__lr=1.0` sets train.lr, MISSING deletes."""
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "text.txt", "seq_len": 8},
        "train": {"steps": 4},
        "run_dir": "run",
    }
    for dotted, value in changes.items():
        *groups, name = dotted.split("__")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
        if value is MISSING:
            del group[name]
    return tree


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings(**changes))
