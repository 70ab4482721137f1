"""Shares the trial forwards of models among tests: tracing a tiny model takes longer than training it for a step."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any

from megatrain_ray.engine.discovery.discover import Trials, discover
from megatrain_ray.engine.model.parameter_rules import ALL_ALIKE, ParameterRules
from megatrain_ray.engine.model.structure import ModelFactory

_TRIALS: dict[object, Trials] = {}


def trials_of(factory: ModelFactory, rules: ParameterRules) -> Trials:
    """Return the trial forwards so far of models of this configuration and rules, in whatever folder they lie."""
    if not is_dataclass(factory) or "code=None" not in repr(factory):
        return {}
    return _TRIALS.setdefault((re.sub(r"PosixPath\([^)]*\)", "", repr(factory)), rules), {})


def discover_once(factory: ModelFactory, *shape: Any, **how: Any) -> Any:
    """Take the place of `discover` where the product calls it."""
    rules = shape[3] if len(shape) > 3 else ALL_ALIKE
    return discover(factory, *shape, **{**how, "trials": trials_of(factory, rules)})
