"""Documents to windows: cut alone and packed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch, assemble
from megatrain_ray.io.batching.windows import PackedWindows, Rows, SpanWindows, Windows, cut
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.texts import END, corpus_of

DOCUMENTS = st.lists(st.integers(0, 23), min_size=1, max_size=9).filter(lambda sizes: sum(sizes) > 1)


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents in which no token stands twice."""
    return [[1000 + 100 * index + at for at in range(size)] for index, size in enumerate(sizes)]


def windows_of(documents: list[list[int]], seq_len: int, *, packing: bool) -> Windows:
    return cut(corpus_of(*documents), seq_len=seq_len, packing=packing, vocab_size=1 << 16)


def whole(windows: Windows) -> Batch:
    return assemble(windows.rows(np.arange(windows.num_windows)))


def pairs(batch: Batch) -> list[tuple[int, int]]:
    """(input, target) of all supervised tokens."""
    there = batch.targets != IGNORED
    return list(zip(batch.input_ids[there].tolist(), batch.targets[there].tolist(), strict=True))


# --- each document alone ---


@settings(deadline=None, derandomize=True)
@given(DOCUMENTS.filter(lambda sizes: max(sizes) > 1), st.integers(1, 7))
def test_windows_are_the_whole_strides_of_each_document(sizes: list[int], seq_len: int) -> None:
    documents = numbered(sizes)
    expected = []
    for document in documents:
        parts = [document[i : i + seq_len + 1] for i in range(0, len(document), seq_len + 1)]
        strides = [p for p in parts if len(p) == seq_len + 1]
        expected += strides or [p for p in parts[:1] if len(p) > 1]
    windows = windows_of(documents, seq_len, packing=False)
    rows = windows.rows(np.arange(windows.num_windows))
    assert [ids[there >= 0].tolist() for ids, there in zip(rows.ids, rows.documents, strict=True)] == expected
    assert pairs(whole(windows)) == [pair for part in expected for pair in pairwise(part)]


def test_a_short_window_is_padded_and_its_pads_never_count() -> None:
    batch = whole(cut(corpus_of(b"abcdeFGH", b"xyz"), seq_len=4, packing=False, vocab_size=257))
    a, b, c, d, e, x, y, z = b"abcdexyz"
    assert batch.input_ids.tolist() == [[a, b, c, d], [x, y, z, 0]]
    assert batch.targets.tolist() == [[b, c, d, e], [y, z, -100, -100]]
    assert (batch.num_supervised, batch.num_tokens, batch.sum_squared_lengths) == (6, 7, 16 + 9)
    assert batch.input_ids.dtype == batch.targets.dtype == np.int64
    assert batch.positions is None
    (row,) = whole(cut(corpus_of([5, 0, 0]), seq_len=4, packing=False, vocab_size=257)).targets.tolist()
    assert row == [0, 0, -100, -100], "an id that pads have is learned where it stands in a text"


# --- packed ---


def test_packed_documents_are_told_apart() -> None:
    batch = whole(cut(corpus_of(b"abc", b"d", b"efghijkl"), seq_len=6, packing=True, vocab_size=257))
    a, b, c, d, _, f, g, h, i, j, k = b"abcdefghijk"
    assert batch.input_ids.tolist() == [[a, b, c, END, d, END], [f, g, h, i, j, k]]
    assert batch.targets.tolist() == [[b, c, END, -100, END, -100], [g, h, i, j, k, ord("l")]]
    assert batch.positions is not None
    assert batch.positions.dtype == np.int64
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert (batch.num_supervised, batch.num_tokens, batch.sum_squared_lengths) == (10, 12, 16 + 4 + 36)


def test_a_short_packed_window_is_padded() -> None:
    batch = whole(cut(corpus_of(b"a", b"bc"), seq_len=6, packing=True, vocab_size=257))
    a, b, c = b"abc"
    assert batch.input_ids.tolist() == [[a, END, b, c, 0, 0]]
    assert batch.targets.tolist() == [[END, -100, c, -100, -100, -100]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 0, 1, 0, 1]]
    assert (batch.num_supervised, batch.num_tokens, batch.sum_squared_lengths) == (2, 4, 8)


def test_a_batch_whose_rows_hold_one_document_each_has_no_positions() -> None:
    windows = cut(corpus_of(b"abcdef", b"ghijkl"), seq_len=2, packing=True, vocab_size=257)
    batch = assemble(windows.rows(np.array([0, 1, 3])))
    assert batch.positions is None
    crossing = assemble(windows.rows(np.array([0, 2])))
    assert crossing.positions is not None
    assert crossing.positions.tolist() == [[0, 1], [0, 0]]


@settings(deadline=None, derandomize=True)
@given(DOCUMENTS, st.integers(1, 30))
def test_packed_windows_are_the_strides_of_the_joined_documents(sizes: list[int], seq_len: int) -> None:
    joined = [token for document in numbered(sizes) for token in [*document, END]][:-1]
    owners = [index for index, size in enumerate(sizes) for _ in range(size + 1)][:-1]
    windows = PackedWindows(corpus_of(*numbered(sizes)), seq_len, END)
    rows = windows.rows(np.arange(windows.num_windows))
    strides = [joined[i : i + seq_len + 1] for i in range(0, len(joined), seq_len + 1)]
    kept = [stride for stride in strides if len(stride) == seq_len + 1] or strides[:1]
    assert [ids[there >= 0].tolist() for ids, there in zip(rows.ids, rows.documents, strict=True)] == kept
    assert rows.documents[rows.documents >= 0].tolist() == owners[: sum(map(len, kept))]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=30))
def test_packed_and_unpacked_targets_are_equal_for_documents_within_a_window(sizes: list[int]) -> None:
    """No cut goes through these documents; each has its end, which it would not have on its own."""
    documents = numbered(sizes)
    packed = PackedWindows(corpus_of(*documents), 16, END)
    rows = packed.rows(np.arange(packed.num_windows))
    batch = assemble(rows)
    ended = [[*document, END] for document in documents[:-1]] + documents[-1:]
    alone = {index: pairs(whole(windows_of([d], 16, packing=False))) for index, d in enumerate(ended) if len(d) > 1}
    seen = 0
    for row in range(packed.num_windows):
        owners = rows.documents[row, :-1]
        for index in set(owners[owners >= 0].tolist()):
            if int((rows.documents[row] == index).sum()) == len(ended[index]) > 1:
                there = (owners == index) & (batch.targets[row] != IGNORED)
                ids, targets = batch.input_ids[row][there].tolist(), batch.targets[row][there].tolist()
                assert list(zip(ids, targets, strict=True)) == alone[index]
                seen += 1
    assert seen >= packed.num_windows - 1 - sum(len(document) == 1 for document in ended)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=4))
def test_positions_begin_again_with_every_document(rows: list[list[int]]) -> None:
    width = max(sum(lengths) for lengths in rows)
    documents, expected = [], []
    for lengths in rows:
        pads = width - sum(lengths)
        documents.append([s for s, n in enumerate(lengths) for _ in range(n)] + [-1] * (pads + 1))
        expected.append([at for n in [*lengths, pads] for at in range(n)])
    shape = len(rows), width + 1
    batch = assemble(
        Rows(
            np.zeros(shape, np.int64),
            np.array(documents),
            np.ones(shape, np.float32),
            np.zeros(shape, np.float32),
            np.zeros((*shape, 0), np.float32),
        )
    )
    assert batch.sum_squared_lengths == sum(n * n for lengths in rows for n in lengths)
    assert (batch.positions is None) == all(len(lengths) == 1 for lengths in rows)
    if batch.positions is not None:
        assert batch.positions.tolist() == expected


# --- what holds no window, or no end ---


def test_one_document_is_cut_in_the_same_way_with_packing_and_without() -> None:
    assert isinstance(windows_of([[1, 2, 3, 4]], 2, packing=True), SpanWindows)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("documents", [[], [[]], [[7]], [[], []]])
def test_what_holds_no_window_is_refused(documents: list[list[int]], packing: bool) -> None:
    tokens = sum(map(len, documents))
    with pytest.raises(ConfigError, match=f"nothing to learn in texts: a window needs 2 tokens, got {tokens} in "):
        windows_of(documents, 4, packing=packing)


def test_joining_needs_an_end_that_the_model_has() -> None:
    two = [b"ab", b"cd"]
    with pytest.raises(ConfigError, match=r"end of a document has id 256, but the model's vocab_size is 256"):
        cut(corpus_of(*two), seq_len=4, packing=True, vocab_size=256)
    with pytest.raises(ConfigError, match=r"name no eos_token that its tokenizer.json has"):
        cut(corpus_of(*two, end_of_document=None), seq_len=4, packing=True, vocab_size=256)
    for packing, documents in [(False, two), (True, two[:1])]:
        cut(corpus_of(*documents, end_of_document=None), seq_len=4, packing=packing, vocab_size=256)
