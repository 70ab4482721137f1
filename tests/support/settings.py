"""Makes the smallest configuration there is, with changes by dotted key."""

from __future__ import annotations

from typing import Any

from megatrain_ray.config.schema import TrainConfig

MISSING = object()


def settings(**changes: Any) -> dict[str, Any]:
    """Return the configuration as plain data. `train__lr=1.0` sets train.lr; MISSING deletes a key."""
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
