"""Says which candidates share a result, so that it is computed once for all of them. Pure."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from megatrain_ray.engine.planner.request import Candidate


class Alike:
    """Describes candidates that share a result: those that differ in some fields only.

    key: returns the values of the other fields. A search asks for it a million times, and it is one call of C code.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        """Take these fields as making no difference.

        values: for each field the value that stands for all.
        """
        self._values = values
        self.key = itemgetter(*(i for i, name in enumerate(Candidate._fields) if name not in values))

    def representative(self, candidate: Candidate) -> Candidate:
        """Return the candidate that stands for all that share the result."""
        return candidate._replace(**self._values)
