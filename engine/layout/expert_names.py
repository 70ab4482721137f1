"""Names of parameters that are a range of a stack of experts (model/expert_groups.py): of MODULE.gate_up_proj experts 4
to 7 are MODULE.[4:8].gate_up_proj, a name that no module of a model has by itself. A checkpoint knows the whole stack
alone, and so do a run's patterns."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

RANGE = re.compile(r"\.\[(\d+):\d+\](?=\.\w+$)")


class PlaceInWhole(NamedTuple):
    """Where a parameter's elements lie in that of a checkpoint: from element `start` of `name` on."""

    name: str
    start: int


def name_of_range(first: int, size: int) -> str:
    """Of the module that holds so many experts from this one on, in that of all of them."""
    return f"[{first}:{first + size}]"


def whole_name(name: str) -> str:
    """What the parameter is called where its experts are not apart; its own name where it is no range of them."""
    return RANGE.sub("", name)


def place_in_whole(name: str, shape: tuple[int, ...]) -> PlaceInWhole:
    """`shape`: of the parameter `name`. One that is no range of experts is a whole."""
    found = RANGE.search(name)
    return PlaceInWhole(whole_name(name), int(found[1]) * math.prod(shape[1:]) if found else 0)


def joined_shape(shape: tuple[int, ...] | None, further: tuple[int, ...]) -> tuple[int, ...]:
    """Of what has `shape` with a further range of experts behind it; None: there was nothing."""
    return further if shape is None else (shape[0] + further[0], *shape[1:])
