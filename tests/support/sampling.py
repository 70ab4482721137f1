"""Chooses which cases of a parametrised test `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Case = Mapping[str, int]  # of each parameter the number of its value


def pairwise(cases: Sequence[Case]) -> list[int]:
    """Return positions of few cases in which every pair of values of two parameters occurs that occurs in any.

    Greedy: the case with the most new pairs comes next, the first of several. Most faults need no more than two values
    to meet (Kuhn, Wallace and Gallo, "Software fault interactions", 2004).
    """
    pairs = [_pairs(case) for case in cases]
    missing = set().union(*pairs)
    chosen = [k for k, case in enumerate(cases) if not case]  # it has no parameters
    while missing:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def numbered(cases: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return cases with values of any type with numbers in their place, equal ones for equal values."""
    seen: dict[str, list[Any]] = {}
    numbers: list[Case] = []
    for case in cases:
        for name, value in case.items():
            if value not in seen.setdefault(name, []):
                seen[name].append(value)
        numbers.append({name: seen[name].index(value) for name, value in case.items()})
    return numbers


def spread(num_cases: int, num_wanted: int) -> list[int]:
    """Return the positions of so many cases, evenly spaced, the first and the last among them."""
    wanted = min(num_cases, num_wanted)
    return sorted({round(k * (num_cases - 1) / max(1, wanted - 1)) for k in range(wanted)})


def _pairs(case: Case) -> set[tuple[tuple[str, int], ...]]:
    values = sorted(case.items())
    return set(combinations(values, 2)) if len(values) > 1 else {tuple(values)}
