"""Layers take gradient regions in turn, by size."""

from __future__ import annotations

import pytest

from megatrain_ray.engine.plan.residency import regions_of


def test_layers_of_one_size_take_turns() -> None:
    assert regions_of([5, 4, 3, 2, 1], [8] * 5, [8, 8]) == {5: 0, 4: 1, 3: 0, 2: 1, 1: 0}


def test_the_largest_have_a_region_to_themselves() -> None:
    """Head 4 and embedding 0: the head's is full while the first block's is made."""
    assert regions_of([4, 3, 2, 1, 0], [21, 8, 8, 8, 20], [21, 8, 8]) == {4: 0, 3: 1, 2: 2, 1: 1, 0: 0}


def test_blocks_share_the_largest_if_they_have_one_of_their_own() -> None:
    """A block before the embedding holds its region: the embedding waits."""
    assert regions_of([5, 4, 3, 2, 1, 0], [21, 8, 8, 8, 8, 20], [21, 8]) == {5: 0, 4: 1, 3: 0, 2: 1, 1: 0, 0: 0}
    assert regions_of([3, 2, 1, 0], [21, 8, 8, 20], [21]) == {3: 0, 2: 0, 1: 0, 0: 0}


def test_a_small_one_takes_its_turn_among_the_next_larger() -> None:
    assert regions_of([3, 2, 1, 0], [2, 8, 8, 20], [20, 8, 8]) == {3: 1, 2: 2, 1: 1, 0: 0}


def test_one_each() -> None:
    assert regions_of([3, 2, 1, 0], [21, 8, 8, 20], [21, 8, 8, 20]) == {3: 0, 2: 1, 1: 2, 0: 3}


def test_none_that_holds_it() -> None:
    with pytest.raises(ValueError, match="layer 1: a gradient of 9 bytes"):
        regions_of([1], [9], [8, 8])
