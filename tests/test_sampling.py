"""Few cases stand for all: every pair of values is among them."""

from __future__ import annotations

from itertools import combinations, product

from tests.support.sampling import numbered, pairwise, spread


def test_every_pair_of_values_occurs() -> None:
    sizes = {"a": 2, "b": 3, "c": 2, "d": 4}
    cases = [dict(zip(sizes, values, strict=True)) for values in product(*map(range, sizes.values()))]
    chosen = pairwise(cases)
    assert len(chosen) < len(cases) / 3
    for one, other in combinations(sizes, 2):
        found = {(cases[k][one], cases[k][other]) for k in chosen}
        assert found == set(product(range(sizes[one]), range(sizes[other])))
    assert pairwise([{"a": 0}, {"a": 1}]) == [0, 1]
    assert pairwise([]) == []


def test_values_of_any_type_are_numbered() -> None:
    assert numbered([{"a": {}, "b": 2.5}, {"a": {1}, "b": 2.5}, {"a": {}, "b": None}]) == [
        {"a": 0, "b": 0},
        {"a": 1, "b": 0},
        {"a": 0, "b": 1},
    ]


def test_a_spread_has_both_ends() -> None:
    assert spread(78, 5) == [0, 19, 38, 58, 77]
    assert spread(3, 5) == [0, 1, 2]
    assert spread(9, 1) == [0]
