"""Weighted sources: shares, order, and resuming."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.mixture import MixedStream, draw_next, drawn_after, integer_weights
from megatrain_ray.io.batching.windows import Windows, cut
from tests.support.texts import corpus_of

SIZES = (5, 3, 11)  # windows


def source(index: int, num_windows: int) -> Windows:
    """Window i of it begins with 1000 index + 2 i."""
    tokens = [1000 * index + at for at in range(2 * num_windows)]
    return cut(corpus_of(tokens, name=f"source {index}"), seq_len=1, packing=True, vocab_size=1 << 16)


def stream(
    weights: tuple[float, ...] = (3, 1, 0.5), batch_size: int = 4, sizes: tuple[int, ...] = SIZES
) -> MixedStream:
    sources = [source(index, size) for index, size in enumerate(sizes)]
    return MixedStream(sources, weights, batch_size=batch_size, shuffle=True, seed=0)


def drawn(stream: MixedStream, batches: int) -> list[int]:
    return np.concatenate([stream.next_batch().input_ids[:, 0] for _ in range(batches)]).tolist()


@given(st.lists(st.integers(1, 1000) | st.sampled_from([1, 2, 3, 10, 100]), min_size=1, max_size=12))
def test_each_source_stays_within_one_window_of_its_share_at_every_prefix(weights: list[int]) -> None:
    counts, total = [0] * len(weights), sum(weights)
    for turn in range(1, 300):
        draw_next(weights, counts)
        assert all(abs(weight * turn - total * count) < total for weight, count in zip(weights, counts, strict=True))


def test_the_order_of_sources_is_fixed_for_ever() -> None:
    counts = [0, 0, 0]
    assert [draw_next((3, 2, 1), counts) for _ in range(12)] == [0, 1, 0, 2, 1, 0] * 2


@given(
    st.lists(st.integers(1, 10**9) | st.sampled_from([1, 2, 3, 10, 100]), min_size=1, max_size=12),
    st.integers(0, 700),
)
@settings(deadline=None)
def test_counts_after_any_number_of_windows_are_as_if_drawn(weights: list[int], num_windows: int) -> None:
    counts = [0] * len(weights)
    for _ in range(num_windows):
        draw_next(weights, counts)
    assert drawn_after(weights, num_windows) == counts


def test_a_skip_does_not_go_through_all_windows() -> None:
    weights = integer_weights([1.00001, 2.00003, 3.1, 4.77771, 0.3, 0.7, 0.9, 1.1])
    total = sum(weights)
    assert drawn_after(weights, 10**9 * total) == [10**9 * weight for weight in weights]


def test_weights_are_the_numbers_that_are_written() -> None:
    assert integer_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert integer_weights([6, 4.0]) == (3, 2)
    assert integer_weights([1e-5, 1]) == (1, 100_000)


def test_every_window_of_a_source_comes_once_in_each_of_its_epochs() -> None:
    seen = drawn(stream(), 90)
    assert [Counter(token // 1000 for token in seen)[index] for index in range(3)] == [240, 80, 40]
    for index, size in enumerate(SIZES):
        mine = [token for token in seen if token // 1000 == index]
        epochs = [mine[at : at + size] for at in range(0, len(mine) - size + 1, size)]
        assert all(sorted(epoch) == [1000 * index + 2 * i for i in range(size)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_sources_of_the_same_size_have_orders_of_their_own() -> None:
    seen = drawn(stream((1, 1), 40, (20, 20)), 1)
    assert [token for token in seen if token < 1000] != [token - 1000 for token in seen if token >= 1000]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 7))
def test_it_goes_on_at_any_window_with_any_batch_size(before: int, first: int, second: int) -> None:
    whole = drawn(stream(batch_size=1), before * first + 4 * second)
    ours = stream(batch_size=first)
    assert drawn(ours, before) == whole[: before * first] if before else True
    again = stream(batch_size=second)
    again.seek(json.loads(json.dumps(ours.position)))
    assert again.position == ours.position
    assert drawn(again, 4) == whole[before * first :]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(0, 30), st.integers(1, 7))
def test_batches_that_are_skipped_are_as_if_drawn(before: int, skipped: int, batch_size: int) -> None:
    first, second = stream(batch_size=batch_size), stream(batch_size=batch_size)
    for ours in (first, second):
        if before:
            drawn(ours, before)
    for _ in range(skipped):
        first.next_batch()
    second.skip(skipped)
    assert second.position == first.position
    assert drawn(second, 2) == drawn(first, 2)


def test_a_position_of_other_data_names_the_source() -> None:
    position = stream().position
    with pytest.raises(ConfigError, match=r"saved with other data than source 1 holds now"):
        stream(sizes=(5, 4, 11)).seek(position)
    with pytest.raises(ConfigError, match=r"is of 3 weighted sources, data\.path has 2"):
        stream((1, 1), sizes=(5, 3)).seek(position)
