"""Sequences of chats as rows: whole, each once an epoch, learned alike alone and side by side."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.io.batching.batch_stream import Batch, BatchStream, assemble
from megatrain_ray.io.batching.mixture import MixedStream
from megatrain_ray.io.batching.windows import SpanWindows, Windows, cut, first_fit
from megatrain_ray.io.tokens.token_files import IGNORED, Corpus
from tests.support.texts import corpus_of

SEQ_LEN = 7


class Chats(NamedTuple):
    """Sequences in which no token stands twice, and what is learned of each."""

    ids: list[list[int]]
    masks: list[list[bool]]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(token before, token) of all that is learned."""
        both = zip(self.ids, self.masks, strict=True)
        return [(ids[i - 1], ids[i]) for ids, mask in both for i in range(1, len(ids)) if mask[i]]

    def corpus(self) -> Corpus:
        return replace(corpus_of(*self.ids), supervised=np.concatenate(self.masks))

    def windows(self, *, packing: bool) -> Windows:
        return cut(self.corpus(), seq_len=SEQ_LEN, packing=packing, vocab_size=1 << 16)


def chats_of(masks: list[list[bool]], first: int = 300) -> Chats:
    return Chats([[first + 10 * index + at for at in range(len(mask))] for index, mask in enumerate(masks)], masks)


MASK = st.lists(st.booleans(), min_size=2, max_size=SEQ_LEN + 1).filter(lambda mask: any(mask[1:]))
CHATS = st.lists(MASK, min_size=2, max_size=12).map(chats_of)


def pairs(batch: Batch) -> list[tuple[int, int]]:
    there = batch.targets != IGNORED
    return list(zip(batch.input_ids[there].tolist(), batch.targets[there].tolist(), strict=True))


@settings(deadline=None, derandomize=True)
@given(CHATS, st.booleans(), st.integers(1, 4), st.data())
def test_every_learned_token_comes_once_an_epoch_wherever_the_run_is_resumed(
    chats: Chats, packing: bool, batch_size: int, data: st.DataObject
) -> None:
    windows = chats.windows(packing=packing)
    ours = BatchStream(windows, batch_size=batch_size, shuffle=True, seed=1)
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(windows.num_windows):  # so many rows a batch, so as many epochs as rows a batch
        if data.draw(st.booleans()):
            position = json.loads(json.dumps(ours.position))
            ours = BatchStream(chats.windows(packing=packing), batch_size=batch_size, shuffle=True, seed=1)
            ours.seek(position)
        batch = ours.next_batch()
        assert batch.num_supervised == len(pairs(batch)) > 0
        seen.update(pairs(batch))
    assert seen == Counter(dict.fromkeys(chats.pairs, batch_size))
    assert (ours.position["epoch"], ours.position["cursor"]) == (batch_size, 0)


@settings(deadline=None, derandomize=True)
@given(CHATS)
def test_rows_hold_whole_sequences_told_apart(chats: Chats) -> None:
    windows = chats.windows(packing=True)
    assert isinstance(windows, SpanWindows)
    rows = windows.rows(np.arange(windows.num_windows))
    found = []
    for ids, documents in zip(rows.ids, rows.documents, strict=True):
        numbers = list(dict.fromkeys(documents[documents >= 0].tolist()))
        assert numbers == list(range(len(numbers)))
        found += [ids[documents == number].tolist() for number in numbers]
    assert sorted(found) == sorted(chats.ids)


def test_a_packed_row_as_it_is_learned() -> None:
    chats = chats_of([[False, False, True], [False] * 5 + [True], [True, True], [False, True, True]])
    windows = chats.windows(packing=True)
    batch = assemble(windows.rows(np.arange(windows.num_windows)))
    assert batch.input_ids.tolist() == [[300, 301, 302, 320, 321, 330, 331], [310, 311, 312, 313, 314, 315, 0]]
    assert batch.targets.tolist() == [
        [IGNORED, 302, IGNORED, 321, IGNORED, 331, 332],
        [IGNORED, IGNORED, IGNORED, IGNORED, 315, IGNORED, IGNORED],
    ]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 0]]
    assert (batch.num_supervised, batch.num_tokens, batch.sum_squared_lengths) == (5, 13, 9 + 4 + 4 + 36)


def test_alone_each_has_a_row_and_no_positions() -> None:
    chats = chats_of([[False, True, False], [False] * SEQ_LEN + [True]])
    batch = assemble(chats.windows(packing=False).rows(np.arange(2)))
    assert batch.targets[0].tolist() == [301, *[IGNORED] * 6]
    assert batch.targets[1].tolist() == [*[IGNORED] * 6, 317]
    assert batch.positions is None
    assert (batch.num_supervised, batch.num_tokens) == (2, 3 + SEQ_LEN)


def test_weighted_chats_keep_their_masks() -> None:
    first, second = chats_of([[False, True]] * 3), chats_of([[False, False, True]] * 3, first=600)
    stream = MixedStream(
        [c.windows(packing=False) for c in (first, second)], [1, 1], batch_size=6, shuffle=True, seed=0
    )
    assert sorted(pairs(stream.next_batch())) == sorted(first.pairs + second.pairs)


# --- which sequences share a row ---


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), max_size=40))
def test_first_fit(lengths: list[int]) -> None:
    rooms: list[int] = []
    expected = []
    for length in lengths:
        row = next((row for row, room in enumerate(rooms) if room >= length), len(rooms))
        rooms += [9] * (row == len(rooms))
        rooms[row] -= length
        expected.append(row)
    assert first_fit(np.array(lengths, np.int64), 9).tolist() == expected


def test_rows_that_were_begun_long_ago_are_left() -> None:
    lengths = np.array([5, *[9] * 255, 4, *[9] * 256, 1, 5])
    rows = first_fit(lengths, 9).tolist()
    assert rows[256] == 0
    lengths[0] = 4
    assert first_fit(lengths, 9).tolist()[-2:] == [512, 512]
