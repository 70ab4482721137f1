"""Names the origin of a wrong setting: the configuration file, or an override of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def with_origins(problems: Sequence[str], of_file: Sequence[str], path: str, overrides: Mapping[str, str]) -> str:
    """Return the problems grouped by origin: a single line for one problem, otherwise a list under each origin.

    problems: all problems, of the file with the overrides.
    of_file: problems of the file without overrides.
    path: path of the file.
    overrides: text of each override (`train.lr=1e-4`) by its key.
    """
    by_origin: dict[str, list[str]] = {}
    for problem in problems:
        origin = path if problem in of_file else _origin(problem, path, overrides)
        by_origin.setdefault(origin, []).append(problem)
    if len(problems) == 1:
        return f"{next(iter(by_origin))}: {problems[0]}"
    return "\n".join("\n".join([f"{origin}:", *found]) for origin, found in by_origin.items())


def _origin(problem: str, path: str, overrides: Mapping[str, str]) -> str:
    """Return the origin of a problem that the file without overrides does not have.

    That is the overrides of the keys that the problem names. If it names none, the origin is the file together with all
    overrides, since a setting of the file may be part of the problem.
    """
    stated = problem.partition(";")[0]  # the remedy after the semicolon may name other keys
    key = re.split(r"[: ]", stated, maxsplit=1)[0]
    named = [text for name, text in overrides.items() if _names(stated, name) or name.startswith(f"{key}.")]
    if named:
        return f"override {', '.join(map(repr, named))}"
    return " ".join([path, *(["with", *overrides.values()] if overrides else [])])


def _names(text: str, key: str) -> bool:
    """Return whether the text contains this key, or a key inside of it."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None
