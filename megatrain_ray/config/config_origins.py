"""Where a wrong setting was made: in the file, or in an override beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def with_origins(problems: Sequence[str], of_file: Sequence[str], path: str, overrides: Mapping[str, str]) -> str:
    """The problems under the names of what made them: a line where there is one, else a list under each name.

    `of_file`: the problems that the file alone has. `overrides`: their texts (`train.lr=1e-4`) by key.
    """
    by_origin: dict[str, list[str]] = {}
    for problem in problems:
        origin = path if problem in of_file else _origin(problem, path, overrides)
        by_origin.setdefault(origin, []).append(problem)
    if len(problems) == 1:
        return f"{next(iter(by_origin))}: {problems[0]}"
    return "\n".join("\n".join([f"{origin}:", *found]) for origin, found in by_origin.items())


def _origin(problem: str, path: str, overrides: Mapping[str, str]) -> str:
    """Of a problem that the file alone has not, or not only: overrides that it names; where it names none, a setting
    of the file may have part in it."""
    stated = problem.partition(";")[0]  # a remedy may name others
    key = re.split(r"[: ]", stated, maxsplit=1)[0]
    named = [text for name, text in overrides.items() if _names(stated, name) or name.startswith(f"{key}.")]
    if named:
        return f"override {', '.join(map(repr, named))}"
    return " ".join([path, *(["with", *overrides.values()] if overrides else [])])


def _names(text: str, key: str) -> bool:
    """Whether a text has this key, or one inside of it."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None
