"""Names parameters that are a range of a stack of experts (model/expert_groups.py).

Experts 4 to 7 of MODULE.gate_up_proj are the parameter MODULE.[4:8].gate_up_proj. No module of a model has such a name
by itself. A checkpoint, and the patterns of a run's configuration, know only the whole stack.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

RANGE = re.compile(r"\.\[(\d+):\d+\](?=\.\w+$)")


class PlaceInWhole(NamedTuple):
    """Says where a parameter's elements lie in a checkpoint: in the parameter `name`, from element `start` on."""

    name: str
    start: int


def name_of_range(first: int, size: int) -> str:
    return f"[{first}:{first + size}]"


def whole_name(name: str) -> str:
    """Return the name of the whole stack that the parameter is a range of; else its own name."""
    return RANGE.sub("", name)


def place_in_whole(name: str, shape: tuple[int, ...]) -> PlaceInWhole:
    """Return where a parameter's elements lie in a checkpoint. One that is no range of experts starts at element 0."""
    found = RANGE.search(name)
    return PlaceInWhole(whole_name(name), int(found[1]) * math.prod(shape[1:]) if found else 0)


def joined_shape(shape: tuple[int, ...] | None, further: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a stack of experts (None: there is none yet) with one more range appended."""
    return further if shape is None else (shape[0] + further[0], *shape[1:])
