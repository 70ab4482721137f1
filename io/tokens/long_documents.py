"""Cuts long documents for a batch tokenizer and joins the ids so that they equal those of the whole text.

Neighbouring pieces share the text around their cut. If both give the same tokens there, from well before the cut to
well after it, neither is affected by where its text begins or ends. Then the ids of the one continue with those of the
other. If they differ, the two pieces are encoded again as one text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.token_files import TokenArray, TokenBlock

PIECE_CHARS = 1 << 14  # characters between two cuts: a byte-level BPE took half the CPU time that it took with 1 << 17
OVERLAP_CHARS = 1 << 9  # characters of a piece beyond a cut, on either side
COMPARED_CHARS = OVERLAP_CHARS // 2  # characters in which two pieces must agree, on either side of a cut

Encode = Callable[[str], Any]  # from one text to its tokenizers.Encoding


class TextPiece(NamedTuple):
    """Holds the text of one document from its character `start` on.

    ends: whether the piece reaches the end of the document.
    location: of the document, as in TextBlock.
    """

    text: str
    start: int
    ends: bool
    location: RecordLocation

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.ends


def cut_texts(
    blocks: Iterable[TextBlock], size: int = PIECE_CHARS, overlap: int = OVERLAP_CHARS
) -> Iterator[TextPiece]:
    """Yield documents in pieces: cuts are `size` characters apart, pieces reach `overlap` characters beyond them.

    A piece is cut off only if at least `size` characters follow, so a shorter document stays whole.
    """
    held, start = "", 0
    for block in blocks:
        held += block.text
        at = 0
        while len(held) - at > (end := size + overlap + (overlap if start else 0)) + size:
            yield TextPiece(held[at : at + end], start, False, block.location)
            at += end - 2 * overlap
            start += end - 2 * overlap
        held = held[at:]
        if block.ends:
            yield TextPiece(held, start, True, block.location)
            held, start = "", 0


@dataclass(frozen=True)
class EncodedSpan:
    """Holds an encoded text of the document from its character `start` on.

    begin: character of the document from which its tokens count; earlier ones belong to the piece before.
    encoding: the tokenizers.Encoding of `text`.
    """

    text: str
    start: int
    begin: int
    encoding: Any

    def first_token(self, char: int) -> int:
        """Return the index of the first token that begins at or after this character of the document."""
        tokens = range(len(self.encoding))
        return bisect_left(tokens, char - self.start, key=lambda token: self.encoding.token_to_chars(token)[0])

    def tokens_of(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (id, first character, end) of the tokens that begin in [start, stop), as document offsets."""
        first, last = self.first_token(start), self.first_token(stop)
        spans = (self.encoding.token_to_chars(token) for token in range(first, last))
        ids = self.encoding.ids[first:last]
        return [(token, self.start + a, self.start + b) for token, (a, b) in zip(ids, spans, strict=True)]

    def ids(self, stop: int | None = None) -> TokenArray:
        """Return the ids of the tokens that begin from character `begin` on and before `stop`; None: to the end."""
        last = None if stop is None else self.first_token(stop)
        return np.array(self.encoding.ids[self.first_token(self.begin) : last], np.uint32)


class Joiner:
    """Joins the ids of a document's pieces. Pieces come in order, one document after the other."""

    def __init__(self, encode: Encode, overlap: int = OVERLAP_CHARS, compared: int = COMPARED_CHARS) -> None:
        self._encode = encode
        self._overlap = overlap
        self._compared = compared
        self._span: EncodedSpan | None = None
        self._waiting: list[str] = []  # texts that follow the span, to be encoded together with it

    def add(self, piece: TextPiece, encoding: Any) -> Iterator[TokenBlock]:
        """Take the next piece and yield the ids that no later piece can change."""
        cut = piece.start + self._overlap
        after = EncodedSpan(piece.text, piece.start, cut if piece.start else 0, encoding)
        if self._span is None:
            self._span = after
        elif not self._waiting and self._agree(self._span, after, cut):
            yield TokenBlock(self._span.ids(cut), False, piece.location)
            self._span = after
        else:
            self._span = self._grown(self._span, piece)
        if piece.ends:
            yield TokenBlock(self._span.ids(), True, piece.location)
            self._span = None

    def _agree(self, before: EncodedSpan, after: EncodedSpan, cut: int) -> bool:
        around = (cut - self._compared, cut + self._compared)
        tokens = before.tokens_of(*around)
        return bool(tokens) and tokens[0][1] < cut <= tokens[-1][1] and tokens == after.tokens_of(*around)

    def _grown(self, span: EncodedSpan, piece: TextPiece) -> EncodedSpan:
        """Return the span extended by the piece, encoded again once the pending texts are as long as the span."""
        self._waiting.append(piece.text[2 * self._overlap :])
        if not piece.ends and sum(map(len, self._waiting)) < len(span.text):
            return span
        text = "".join([span.text, *self._waiting])
        self._waiting = []
        return EncodedSpan(text, span.start, span.begin, self._encode(text))
