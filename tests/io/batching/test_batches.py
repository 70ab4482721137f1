"""The order of windows, and that a position means the same for ever."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch_stream import BatchStream, permutation
from megatrain_ray.io.batching.splitmix import splitmix64, splitmix64_chain
from megatrain_ray.io.batching.windows import Windows, cut
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.texts import corpus_of


def stream(windows: Windows, batch_size: int = 2, shuffle: bool = True, seed: int = 0) -> BatchStream:
    return BatchStream(windows, batch_size=batch_size, shuffle=shuffle, seed=seed)


def numbered(num_windows: int) -> Windows:
    """Window i starts with token 2 i."""
    return cut(corpus_of(range(num_windows * 2)), seq_len=1, packing=True, vocab_size=257)


def drawn(stream: BatchStream, batches: int) -> list[int]:
    return [int(row[0]) // 2 for _ in range(batches) for row in stream.next_batch().input_ids]


def test_the_hash_and_the_order_are_fixed_for_ever() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output of the generator seeded with 0
    assert splitmix64(np.arange(9, dtype=np.uint64)).tolist() == [splitmix64(i) for i in range(9)]
    assert permutation(10, 0, 0).tolist() == [0, 9, 1, 6, 3, 5, 4, 2, 8, 7]
    assert permutation(10, 7, 3).tolist() == [2, 9, 1, 7, 6, 3, 8, 4, 0, 5]


def test_an_epoch_holds_every_window_once_and_epochs_and_seeds_differ() -> None:
    orders = [tuple(permutation(1000, seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert splitmix64_chain(0, 1) != splitmix64_chain(1, 0)


def test_a_batch_may_span_epochs() -> None:
    order = [*permutation(3, 5, 0), *permutation(3, 5, 1), *permutation(3, 5, 2)]
    whole = stream(numbered(3), batch_size=8, seed=5)
    assert drawn(whole, 1) == order[:8]
    assert (whole.position["epoch"], whole.position["cursor"]) == (2, 2)
    assert drawn(stream(numbered(3), batch_size=2, seed=5), 4) == order[:8]


def test_without_shuffle_windows_come_as_they_lie() -> None:
    assert drawn(stream(numbered(3), batch_size=4, shuffle=False), 2) == [0, 1, 2, 0, 1, 2, 0, 1]


@settings(deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 1),
    seq_len=st.integers(1, 9),
    packing=st.booleans(),
    data=st.data(),
)
def test_every_supervised_token_comes_once_an_epoch_wherever_the_run_is_resumed(
    sizes: list[int], seq_len: int, packing: bool, data: st.DataObject
) -> None:
    documents = [[300 + 50 * index + at for at in range(size)] for index, size in enumerate(sizes)]
    try:
        windows = cut(corpus_of(*documents), seq_len=seq_len, packing=packing, vocab_size=1 << 16)
    except ConfigError:  # single tokens, each alone
        return
    lying = stream(windows, batch_size=windows.num_windows, shuffle=False).next_batch()
    expected = sorted(zip(lying.input_ids.flatten().tolist(), lying.targets.flatten().tolist(), strict=True))
    ours = stream(windows, batch_size=1)
    seen = []
    for _ in range(windows.num_windows):
        if data.draw(st.booleans()):
            position = json.loads(json.dumps(ours.position))
            ours = stream(windows, batch_size=1)
            ours.seek(position)
        batch = ours.next_batch()
        seen += zip(batch.input_ids.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
    assert sorted(seen) == expected
    assert sum(target != IGNORED for _, target in seen) == lying.num_supervised
    assert (ours.position["epoch"], ours.position["cursor"]) == (1, 0)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(1, 5))
def test_a_position_survives_json_and_continues_exactly(before: int, batch_size: int) -> None:
    first = stream(numbered(7), batch_size, seed=3)
    drawn(first, before)
    second = stream(numbered(7), batch_size, seed=3)
    second.seek(json.loads(json.dumps(first.position)))
    assert second.position == first.position
    assert drawn(second, 4) == drawn(first, 4)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 5))
def test_batches_that_are_skipped_are_as_if_drawn(before: int, skipped: int, batch_size: int) -> None:
    first, second = stream(numbered(7), batch_size, seed=3), stream(numbered(7), batch_size, seed=3)
    drawn(first, before + skipped)
    drawn(second, before)
    second.skip(skipped)
    assert second.position == first.position
    assert drawn(second, 4) == drawn(first, 4)


def test_going_back_to_an_earlier_position_repeats_the_batches() -> None:
    it = stream(numbered(7), seed=3)
    start = it.position
    first = drawn(it, 9)
    it.seek(start)
    assert drawn(it, 9) == first


@pytest.mark.parametrize("other", [(b"abcdefghij", b"abcdeX"), (b"abcdefgh", b"ijabcdef"), (b"abcdefghijabcdef",)])
def test_a_position_of_other_data_is_refused_naming_both(other: tuple[bytes, ...]) -> None:
    """Other text; the same text cut into documents elsewhere; the same text as one document."""

    def over(*documents: bytes) -> BatchStream:
        return stream(cut(corpus_of(*documents), seq_len=4, packing=False, vocab_size=257))

    saved, now = over(*other).position, over(b"abcdefghij", b"abcdef")
    with pytest.raises(ConfigError, match=f"16 tokens with checksum {saved['crc32']:08x} then, 16 .* now") as e:
        now.seek(saved)
    assert f"checksum {now.position['crc32']:08x} now" in str(e.value)


def test_a_position_outside_of_the_epoch_is_refused() -> None:
    it = stream(numbered(7))
    with pytest.raises(ConfigError, match=r"cursor 7.* outside of the 7 windows"):
        it.seek(it.position | {"cursor": 7})
