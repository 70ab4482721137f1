"""How many layers fit: found with few looks, and the number that looking at all of them finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes, first_alike
from megatrain_ray.engine.discovery.compile_trial import BudgetCost, CompileTrial
from megatrain_ray.engine.planner.search.fill_device import first_above


class Counted:
    def __init__(self, values: Sequence[int]) -> None:
        self.looked_at: list[int] = []
        self._values = values

    def __call__(self, index: int) -> int:
        self.looked_at.append(index)
        return self._values[index]


@given(st.lists(st.integers(-3, 3) | st.integers(-(10**12), 10**12), max_size=200).map(sorted))
def test_the_first_above_zero(values: list[int]) -> None:
    counted = Counted(values)
    expected = next((i for i, value in enumerate(values) if value > 0), len(values))
    assert first_above(counted, len(values)) == expected
    assert len(counted.looked_at) == len(set(counted.looked_at)) <= 2 + 2 * len(values).bit_length()


@pytest.mark.parametrize("crossing", [1, 7, 90, 179])
@pytest.mark.parametrize("bend", [lambda i: 0, lambda i: 30 * (i > 100)], ids=["straight", "with a step"])
def test_bytes_that_rise_in_a_line_take_few_looks(crossing: int, bend: Callable[[int], int]) -> None:
    values = [1000 * (i - crossing) + 1 + bend(i) - bend(crossing) for i in range(182)]
    counted = Counted(values)
    assert first_above(counted, 182) == crossing
    assert len(counted.looked_at) <= 6


def test_what_is_alike_is_the_same_in_every_respect() -> None:
    assert first_alike(["a", "b", "a", "c", "b"]) == (0, 1, 0, 3, 1)
    assert first_alike([]) == ()
    trials = [CompileTrial((BudgetCost(1.0, kept, (), 0.0),)) for kept in (5, 5, 5, 6, 5)]
    activations = ActivationBytes((1, 1, 1, 1, 2), (3, 3, 4, 3, 3), compiled=tuple(trials))
    assert activations.alike == (0, 0, 2, 3, 4), "what is kept, by a budget too, and what enters the layer behind"
    assert ActivationBytes((1, 1, 1), (3, 3, 3)).alike == (0, 0, 0)
