"""Escapes characters by which a name from outside could change a terminal, or forge a line of the output."""

from __future__ import annotations

import re

# Control characters except the tab, separators of lines, marks that change the direction of writing, and halves of
# characters, which no stream can encode.
UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """Return a text with its unsafe characters written as `\\n`, `\\x1b` or `\\u202e`, except those in `keep`.

    JSON text stays JSON text of the same value.
    """
    return UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return character.encode("unicode_escape").decode() if code < 0x7F else f"\\u{code:04x}"
