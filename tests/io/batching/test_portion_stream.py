"""Sources in portions: every window once an epoch, in an order that a position says, whatever is on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.batching.corpus import Fingerprint
from megatrain_ray.io.batching.mixture import MixedStream
from megatrain_ray.io.batching.portion_stream import PortionFacts, PortionStream, stream_of
from megatrain_ray.io.batching.windows import SpanWindows, Windows
from tests.support.texts import corpus_of

SIZES = (5, 0, 3, 7)  # windows of each portion


class Held:
    """Holds portions of windows of three tokens, the first of which tells portion and window."""

    name, joins_documents, weighted = "texts", False, False

    def __init__(self, sizes: Sequence[int] = SIZES, there: Sequence[int] | None = None, **listing: Any) -> None:
        self.num_portions = len(sizes)
        self.listing = {"files": len(sizes), "digest": "d"} | listing
        self.there = set(range(len(sizes)) if there is None else there)
        self.opened: list[int] = []
        self._windows = [
            SpanWindows.of_documents(corpus_of(*([number, window, 1] for window in range(size))), seq_len=2)
            for number, size in enumerate(sizes)
        ]
        self.known = {
            number: PortionFacts(size, Fingerprint(3 * size, number), 9, 9) for number, size in enumerate(sizes)
        }

    def facts(self, number: int) -> PortionFacts | None:
        return self.known.get(number)

    def is_there(self, number: int) -> bool:
        return number in self.there

    def open(self, number: int) -> Windows:
        assert number in self.there
        self.opened.append(number)
        return self._windows[number]


def stream(portions: Held, batch_size: int = 4, *, shuffle: bool = True, seed: int = 0) -> PortionStream:
    return PortionStream(portions, batch_size=batch_size, shuffle=shuffle, seed=seed)


def drawn(ours: PortionStream, count: int) -> list[tuple[int, int]]:
    return [(int(ids[0]), int(ids[1])) for ids in ours.draw(count).ids]


def test_an_epoch_has_each_window_once_portion_after_portion_in_an_order_of_its_own() -> None:
    whole = sorted((number, window) for number, size in enumerate(SIZES) for window in range(size))
    ours, held = stream(Held()), Held()
    epochs = [drawn(ours, 15) for _ in range(4)]
    for windows in epochs:
        assert sorted(windows) == whole
        numbers = [number for number, _ in windows]
        assert len([k for k in range(1, 15) if numbers[k] != numbers[k - 1]]) == 2, "each portion is opened once"
    assert len({tuple(windows) for windows in epochs}) == 4
    again = stream(held)
    assert [drawn(again, 1)[0] for _ in range(60)] == [*chain(*epochs)]
    assert len(held.opened) <= 12, "each portion once an epoch"
    assert drawn(stream(Held(), seed=1), 15) != epochs[0]
    assert drawn(stream(Held(), shuffle=False), 15) == whole


@pytest.mark.parametrize("before", range(0, 40, 3))
def test_a_stream_goes_on_from_any_position_and_skips_to_it(before: int) -> None:
    ours, skipped = stream(Held(), 3), stream(Held(), 3)
    if before:
        drawn(ours, before)
    skipped.skip(before // 3)
    position = json.loads(json.dumps(ours.position))
    assert skipped.position == position
    resumed = stream(Held(), 3)
    resumed.seek(position)
    assert resumed.num_drawn == before
    expected = [ours.next_batch().input_ids for _ in range(9)]
    assert np.array_equal(expected, [resumed.next_batch().input_ids for _ in range(9)])
    assert np.array_equal(expected, [skipped.next_batch().input_ids for _ in range(9)])


def test_what_is_ready_ends_at_the_first_portion_that_is_not_on_disk() -> None:
    held = Held(there=())
    order = [number for number, _ in dict.fromkeys((n, 0) for n, _ in drawn(stream(Held()), 15))]
    known, held.known = held.known, {}
    ours = stream(held)
    assert len(ours.upcoming()) == 1, "that after a portion that was never made may have no windows"
    assert ours.num_ready == 0
    held.known = known
    assert ours.upcoming() == order[:2]
    held.there = {order[1]}
    assert ours.num_ready == 0
    held.there = {order[0]}
    assert ours.num_ready == SIZES[order[0]]
    held.there = set(order)
    assert ours.num_ready == SIZES[order[0]] + SIZES[order[1]]
    assert (ours.steps_ready(9), ours.steps_ready(1)) == (ours.num_ready // 4, 1)
    ours.draw(2)
    assert ours.num_ready == SIZES[order[0]] + SIZES[order[1]] - 2
    mixed = MixedStream([Held(), held], [1, 3], batch_size=4, shuffle=True, seed=0)
    held.there = set()
    assert mixed.steps_ready(8) == 0
    held.there = set(order)
    assert 1 <= mixed.steps_ready(8) <= 4
    assert MixedStream([Held(), Held()], [1, 1e9], batch_size=1, shuffle=True, seed=0).steps_ready(2) == 2


def test_fewer_windows_than_a_batch_are_held_so_that_their_portions_may_go() -> None:
    held, whole = Held(there=()), drawn(stream(Held(), 13), 24)
    order = [number for number, _ in dict.fromkeys((n, 0) for n, _ in whole)]
    ours = stream(held, 13)
    ours.hold_few()
    assert (ours.num_ready, ours.upcoming()) == (0, order[:2])
    position = ours.position
    for number in order:
        held.there = {number}
        ours.hold_few()
    assert ours.num_ready == 15
    assert drawn(ours, 7) + drawn(ours, 6) == whole[:13]
    ours.seek(position)
    assert ours.num_ready == 0, "another position begins without them"
    alone = stream(Held((3,)), 13)
    alone.hold_few()
    assert alone.num_ready >= 13, "one portion, as often as a batch needs it"


def test_one_portion_is_its_own_successor_and_none_with_a_window_is_an_error() -> None:
    alone = stream(Held((3,)))
    assert alone.upcoming() == [0, 0]
    assert sorted(drawn(alone, 6)) == sorted(2 * [(0, 0), (0, 1), (0, 2)])
    rare = stream(Held((0, 0, 2, 0)))
    for _ in range(20):  # between two epochs there are up to six portions without a window
        assert rare.num_ready == 4
        rare.draw(2)
    with pytest.raises(ConfigError, match="nothing to learn in texts"):
        stream(Held((0, 0))).upcoming()
    forgotten = stream(Held())
    forgotten.portions.known.clear()  # type: ignore[attr-defined]
    with pytest.raises(MegatrainError, match="is not known, although its windows were drawn"):
        forgotten.skip(1)


def test_a_mixture_of_a_stream_and_a_whole_source_goes_on_from_its_position() -> None:
    whole = SpanWindows.of_documents(corpus_of(*([9, window, 1] for window in range(4))), seq_len=2)

    def mixed() -> MixedStream:
        return MixedStream([Held(), whole], [2, 1], batch_size=3, shuffle=True, seed=0)

    ours, resumed, skipped = mixed(), mixed(), mixed()
    firsts = [ours.next_batch().input_ids[:, 0] for _ in range(5)]
    assert [int((ids == 9).sum()) for ids in firsts] == [1] * 5
    resumed.seek(json.loads(json.dumps(ours.position)))
    skipped.skip(5)
    expected = [ours.next_batch().input_ids for _ in range(6)]
    for other in (resumed, skipped):
        assert np.array_equal(expected, [other.next_batch().input_ids for _ in range(6)])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"files": {"files": 4, "digest": "other"}}, "other files than texts has now: files 4, digest other then"),
        ({"files": None}, "other files than texts has now: none then"),
        ({"crc32": 77}, "other data than portion . of texts holds now"),
        ({"cursor": 70}, r"\(window 70\) is outside of the . windows of portion"),
        ({"portion": 4}, "is damaged"),
        ({"cursor": -1}, "is damaged"),
        ({"epoch": "1"}, "is damaged"),
        ({"num_drawn": None}, "is damaged"),
    ],
)
def test_a_position_of_other_data_is_refused(changes: dict[str, Any], problem: str) -> None:
    ours = stream(Held())
    ours.draw(1)
    with pytest.raises(ConfigError, match=problem):
        stream(Held()).seek(ours.position | changes)


def test_a_source_that_is_tokenised_whole_has_an_ordinary_stream() -> None:
    windows = SpanWindows.of_documents(corpus_of([1, 2, 3]), seq_len=2)
    assert not isinstance(stream_of(windows, batch_size=1, shuffle=False, seed=0), PortionStream)
