"""Long documents cut for a tokenizer that works on many texts at once, and the ids put together as if they were whole.

Neighbouring pieces share the text around their cut. Where both make the same tokens of it, from well before the cut to
well after it, neither is under the influence of where its text begins or ends, and the ids of one go on with those of
the other. Where they differ, the two are encoded as one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.tokens.token_block import TokenArray, TokenBlock

PIECE_CHARS = 1 << 14  # between two cuts: a byte-level BPE took half the CPU time that it took with 1 << 17
OVERLAP_CHARS = 1 << 9  # that a piece has beyond a cut, on either side
COMPARED_CHARS = OVERLAP_CHARS // 2  # in which pieces must agree, on either side of a cut

Encode = Callable[[str], Any]  # of one text, to a tokenizers.Encoding


class Piece(NamedTuple):
    """Text of one document from its character `start` on. `ends`: to its end."""

    text: str
    start: int
    ends: bool
    read_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.ends


def cut_texts(blocks: Iterable[TextBlock], size: int = PIECE_CHARS, overlap: int = OVERLAP_CHARS) -> Iterator[Piece]:
    """Documents in pieces that reach `overlap` characters beyond the cuts, which are `size` apart.

    A piece is cut off only where at least `size` characters follow, so a shorter document stays whole.
    """
    held, start = "", 0
    for block in blocks:
        held += block.text
        at = 0
        while len(held) - at > (end := size + overlap + (overlap if start else 0)) + size:
            yield Piece(held[at : at + end], start, False, block.read_bytes)
            at += end - 2 * overlap
            start += end - 2 * overlap
        held = held[at:]
        if block.ends:
            yield Piece(held, start, True, block.read_bytes)
            held, start = "", 0


@dataclass(frozen=True)
class Part:
    """A text of the document from its character `start` on, encoded. Its tokens count from character `begin` on."""

    text: str
    start: int
    begin: int
    encoding: Any

    def first_token(self, char: int) -> int:
        """The first token that begins at this character of the document or after it."""
        tokens = range(len(self.encoding))
        return bisect_left(tokens, char - self.start, key=lambda token: self.encoding.token_to_chars(token)[0])

    def tokens_of(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(id, first character, end) of the tokens that begin in [start, stop)."""
        first, last = self.first_token(start), self.first_token(stop)
        spans = (self.encoding.token_to_chars(token) for token in range(first, last))
        ids = self.encoding.ids[first:last]
        return [(token, self.start + a, self.start + b) for token, (a, b) in zip(ids, spans, strict=True)]

    def ids(self, stop: int | None = None) -> TokenArray:
        """Those that count, of tokens that begin before `stop`."""
        last = None if stop is None else self.first_token(stop)
        return np.array(self.encoding.ids[self.first_token(self.begin) : last], np.uint32)


class Joiner:
    """Puts the ids of a document's pieces together. Pieces come in order, one document after the other."""

    def __init__(self, encode: Encode, overlap: int = OVERLAP_CHARS, compared: int = COMPARED_CHARS) -> None:
        self._encode = encode
        self._overlap = overlap
        self._compared = compared
        self._part: Part | None = None
        self._waiting: list[str] = []  # texts after the part's, to be encoded with it

    def add(self, piece: Piece, encoding: Any) -> Iterator[TokenBlock]:
        """The ids that are certain now."""
        cut = piece.start + self._overlap
        after = Part(piece.text, piece.start, cut if piece.start else 0, encoding)
        if self._part is None:
            self._part = after
        elif not self._waiting and self._agree(self._part, after, cut):
            yield TokenBlock(self._part.ids(cut), False, piece.read_bytes)
            self._part = after
        else:
            self._part = self._grown(self._part, piece)
        if piece.ends:
            yield TokenBlock(self._part.ids(), True, piece.read_bytes)
            self._part = None

    def _agree(self, before: Part, after: Part, cut: int) -> bool:
        around = (cut - self._compared, cut + self._compared)
        tokens = before.tokens_of(*around)
        return bool(tokens) and tokens[0][1] < cut <= tokens[-1][1] and tokens == after.tokens_of(*around)

    def _grown(self, part: Part, piece: Piece) -> Part:
        """The part with the piece, once what waits is as long as the part: no character is encoded many times."""
        self._waiting.append(piece.text[2 * self._overlap :])
        if not piece.ends and sum(map(len, self._waiting)) < len(part.text):
            return part
        text = "".join([part.text, *self._waiting])
        self._waiting = []
        return Part(text, part.start, part.begin, self._encode(text))
