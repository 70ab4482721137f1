"""Sequences of chats as rows: whole, each once an epoch, learned alike alone and side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.io.batching.batch import Batch, assemble
from megatrain_ray.io.batching.batch_stream import BatchStream
from megatrain_ray.io.batching.corpus import Corpus
from megatrain_ray.io.batching.mixture import MixedStream
from megatrain_ray.io.batching.windows import SpanWindows, Windows, cut, first_fit
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.texts import corpus_of

SEQ_LEN = 7
Learned = tuple[int, int, float]  # token before, token, loss weight


class Chats(NamedTuple):
    """Sequences in which no token stands twice, and how much each token is learned."""

    ids: list[list[int]]
    weights: list[list[float]]

    @property
    def learned(self) -> list[Learned]:
        both = zip(self.ids, self.weights, strict=True)
        return [(ids[i - 1], ids[i], own[i]) for ids, own in both for i in range(1, len(ids)) if own[i]]

    def corpus(self) -> Corpus:
        weights = np.concatenate(self.weights).astype(np.float32)
        is_mask = np.isin(weights, (0, 1)).all()
        return replace(corpus_of(*self.ids), loss_weights=weights.astype(np.bool_) if is_mask else weights)

    def windows(self, *, packing: bool) -> Windows:
        return cut(self.corpus(), seq_len=SEQ_LEN, packing=packing, vocab_size=1 << 16)


def chats_of(weights: Sequence[Sequence[float]], first: int = 300) -> Chats:
    ids = [[first + 10 * index + at for at in range(len(own))] for index, own in enumerate(weights)]
    return Chats(ids, [list(map(float, own)) for own in weights])


def sequences(weight: st.SearchStrategy[float]) -> st.SearchStrategy[Chats]:
    one = st.lists(weight, min_size=2, max_size=SEQ_LEN + 1).filter(lambda own: any(own[1:]))
    return st.lists(one, min_size=2, max_size=12).map(chats_of)


CHATS = sequences(st.booleans()) | sequences(st.sampled_from([0.0, 1.0, 0.5, 3.0]))


def learned(batch: Batch) -> list[Learned]:
    there = batch.targets != IGNORED
    weights = there.astype(np.float32) if batch.loss_weights is None else batch.loss_weights
    assert not weights[~there].any()
    columns = (array[there].tolist() for array in (batch.input_ids, batch.targets, weights))
    return list(zip(*columns, strict=True))


@settings(deadline=None, derandomize=True)
@given(CHATS, st.booleans(), st.integers(1, 4), st.data())
def test_every_learned_token_comes_once_an_epoch_wherever_the_run_is_resumed(
    chats: Chats, packing: bool, batch_size: int, data: st.DataObject
) -> None:
    windows = chats.windows(packing=packing)
    ours = BatchStream(windows, batch_size=batch_size, shuffle=True, seed=1)
    seen: Counter[Learned] = Counter()
    for _ in range(windows.num_windows):  # so many rows a batch, so as many epochs as rows a batch
        if data.draw(st.booleans()):
            position = json.loads(json.dumps(ours.position))
            ours = BatchStream(chats.windows(packing=packing), batch_size=batch_size, shuffle=True, seed=1)
            ours.seek(position)
        batch = ours.next_batch()
        assert batch.num_supervised == len(learned(batch)) > 0
        assert batch.total_weight == sum(weight for *_, weight in learned(batch))
        seen.update(learned(batch))
    assert seen == Counter(dict.fromkeys(chats.learned, batch_size))
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


def test_weighted_chats_keep_their_loss_weights() -> None:
    first, second = chats_of([[False, True]] * 3), chats_of([[0, 0, 0.5]] * 3, first=600)
    stream = MixedStream(
        [c.windows(packing=False) for c in (first, second)], [1, 1], batch_size=6, shuffle=True, seed=0
    )
    assert stream.weighted
    assert sorted(learned(stream.next_batch())) == sorted(first.learned + second.learned)


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
