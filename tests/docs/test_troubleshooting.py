"""Every message that docs/troubleshooting.md explains is one that the program gives."""

from __future__ import annotations

import ast
import errno
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"
# What stands for something in a message of the page: an ellipsis, names in capitals, numbers, paths; what joins two.
PLACEHOLDER = re.compile(
    r"…|\b(?:step_)?(?:N|M|P|HOST|ID|NAME|FILE|PATH|KEY)\b(?:\.damaged)?|\d+(?:\.\d+)?|/\S*|[()\[\]']|[;:,.](?: |$)"
)


def messages() -> list[str]:
    """Return the messages of the page: those in backticks in the first column of its tables of messages."""
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    cells = [re.split(r"(?<!\\)\|", row)[1] for table in tables for row in table.splitlines()]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@functools.cache
def said() -> str:
    """Return all texts in the code, each with a hole for whatever is put into it."""
    files = [file for folder in ("megatrain_ray", "io", "engine") for file in (ROOT / folder).rglob("*.py")]
    of_the_system = [os.strerror(number) for number in errno.errorcode]
    return "\n".join([*of_the_system, *(text for file in files for text in texts(ast.parse(file.read_text())))])


def texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def strange(piece: str) -> list[str]:
    """Return the words that the code does not say.

    A word is in the code beside its neighbours, or beside a hole of a message. Names of settings and words of three
    letters are not checked.
    """
    words, found = piece.split(), []
    while words:
        n = next((n for n in range(len(words), 1, -1) if " ".join(words[:n]) in said()), 1)
        word = words[0]
        known = not re.fullmatch("[A-Za-z]{4,}", word) or any(
            at_a_hole in said() for at_a_hole in (f"{HOLE} {word}", f"{word} {HOLE}", f"{word}: {HOLE}", f": {word}")
        )
        if n == 1 and not known:
            found.append(word)
        words = words[n:]
    return found


@pytest.mark.parametrize("message", messages())
def test_its_words_stand_in_the_code(message: str) -> None:
    assert [word for piece in PLACEHOLDER.split(message) for word in strange(piece)] == []


def test_there_are_messages_and_a_made_up_one_is_noticed() -> None:
    assert len(messages()) > 50
    assert strange("is in use by a neighbour of process") == ["neighbour"]
