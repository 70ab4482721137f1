"""Puts what is learned of each answer of a conversation into as few texts as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import NamedTuple

from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError, RecordOutcome

Range = tuple[int, int]
Notes = tuple[RecordOutcome, ...]


class LearnedRange(NamedTuple):
    """Holds a supervised range of characters [start, end) and its loss weight."""

    start: int
    end: int
    weight: float = 1.0


class MarkedText(NamedTuple):
    """Holds a rendered conversation and what is supervised of it.

    ends: the end of each supervised answer, in characters.
    notes: what the template does otherwise than one may expect.
    """

    text: str
    spans: tuple[LearnedRange, ...]
    ends: tuple[int, ...]
    notes: Notes = ()


class AnsweredTurn(NamedTuple):
    """Holds a conversation up to an answer, and what is supervised of that answer."""

    text: str  # the conversation up to and including this turn
    spans: tuple[LearnedRange, ...]
    end: int  # end of the end mark, in characters
    notes: Notes = ()

    @property
    def answered(self) -> str:
        return self.text[: self.end]

    def moved(self, by: int) -> AnsweredTurn:
        """Return the turn as it is in a text in which it stands this many characters later."""
        spans = (span._replace(start=span.start + by, end=span.end + by) for span in self.spans)
        return self._replace(spans=tuple(spans), end=self.end + by)


MakeTurn = Callable[[Conversation, int, float], AnsweredTurn]  # of the answer with this index and loss weight


def turns_in_windows(conversation: Conversation, make_turn: MakeTurn) -> list[AnsweredTurn] | None:
    """Return the turns of a long conversation in time linear in its length; None where the template allows only others.

    An answer is rendered in a window: the turns at the beginning that no user wrote, the last question before the
    previous answer, and all from that answer on. What the window has after the previous answer must stand in the text
    of the whole conversation, where the previous answer ends there. The turns in the middle, at a quarter, and so on
    must also be those that are rendered from the beginning, which takes as long as one more text.
    """
    answers = conversation.answers
    try:
        whole = make_turn(conversation, *answers[-1])
        turns = [make_turn(conversation, *answers[0])]
        for window, before, (index, weight) in _windows(conversation):
            previous, turn = make_turn(window, before, 1.0), make_turn(window, index, weight)
            added = turn.text[previous.end : turn.end]
            if not (turn.text.startswith(previous.answered) and whole.text.startswith(added, turns[-1].end)):
                return None
            turns.append(turn.moved(turns[-1].end - previous.end))
        checked = {len(turns) >> n for n in range(1, len(turns).bit_length())}
        exact = [(whole, turns[-1]), *((make_turn(conversation, *answers[n]), turns[n]) for n in checked)]
    except RecordError:  # perhaps of the window only
        return None
    same = all(a[1:] == b[1:] and whole.text.startswith(a.answered) for a, b in exact)
    return [turn._replace(text=whole.text) for turn in turns] if same else None


def _windows(conversation: Conversation) -> Iterator[tuple[Conversation, int, tuple[int, float]]]:
    """Yield for each answer but the first its window, the previous answer's index there, and its own and weight."""
    messages, question, seen = conversation.messages, slice(0), 0
    head = next((i for i, message in enumerate(messages) if message["role"] in ("user", "assistant")), 0)
    for (before, _), (index, weight) in pairwise(conversation.answers):
        last = next((i for i in range(before, seen - 1, -1) if messages[i]["role"] == "user"), None)
        question, seen = slice(last, last + 1) if last is not None else question, before
        window = (*messages[:head], *messages[question], *messages[before : index + 1])
        place = len(window) - 1
        yield replace(conversation, messages=window), place - (index - before), (place, weight)


def merge_turns(turns: Sequence[AnsweredTurn]) -> list[MarkedText]:
    """Merge turns into as few texts as possible: the last turn's stands for all turns that it holds as answered."""
    texts: list[MarkedText] = []
    left = list(turns)
    while left:
        whole = left[-1].text
        is_held = [turn.text is whole or whole.startswith(turn.answered) for turn in left]
        held = list(compress(left, is_held))
        spans = tuple(span for turn in held for span in turn.spans)
        notes = tuple(dict.fromkeys(note for turn in held for note in turn.notes))
        texts.append(MarkedText(whole, spans, tuple(turn.end for turn in held), notes))
        left = [turn for turn, holds in zip(left, is_held, strict=True) if not holds]
    return texts[::-1]


def common_length(a: str, b: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    if a.startswith(b):
        return len(b)
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def join_touching(spans: Sequence[LearnedRange]) -> list[LearnedRange]:
    """Join ranges that touch: tags may enclose the thought, content and end mark of one answer separately."""
    joined: list[LearnedRange] = []
    for span in spans:
        if joined and (joined[-1].end, joined[-1].weight) == (span.start, span.weight):
            span = span._replace(start=joined.pop().start)
        joined.append(span)
    return joined


def without(span: LearnedRange, holes: Iterable[Range]) -> Iterator[LearnedRange]:
    """Yield the parts of a span that lie outside of the holes, which are sorted."""
    start = span.start
    for hole_start, hole_end in holes:
        if start < hole_start < span.end:
            yield span._replace(start=start, end=hole_start)
        if hole_start < span.end:
            start = max(start, hole_end)
    if start < span.end:
        yield span._replace(start=start)
