from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.engine.plan.plan_groups import SlotSpec
from megatrain_ray.engine.plan.residency import FragmentId, Residency, plan_residency
from megatrain_ray.engine.plan.schedule import LoopOrder, Phase, visits
from megatrain_ray.errors import CapacityError


def simulate(num_layers: int, num_slots: int, num_micro_batches: int, order: LoopOrder) -> Residency:
    sequence = [(FragmentId(v.layer, 0),) for v in visits(num_layers, num_micro_batches, order)]
    fragments = {FragmentId(i, 0): 100 for i in range(num_layers)}
    return plan_residency(sequence, fragments, dict.fromkeys(fragments, "block"), [SlotSpec("block", 100)] * num_slots)


def test_visits_of_both_orders() -> None:
    def short(order: LoopOrder) -> list[str]:
        return [f"{v.phase.value[0]}{v.layer}{list(v.micro_batches)}{'!' * v.last}" for v in visits(3, 2, order)]

    assert short(LoopOrder.LAYERS_OUTER) == ["f0[0, 1]", "f1[0, 1]", "h2[0, 1]!", "b1[0, 1]!", "b0[0, 1]!"]
    assert short(LoopOrder.MICRO_BATCHES_OUTER) == [
        *("f0[0]", "f1[0]", "h2[0]", "b1[0]", "b0[0]"),
        *("f0[1]", "f1[1]", "h2[1]!", "b1[1]!", "b0[1]!"),
    ]


def test_a_segment_is_run_forward_once_more_before_its_backward() -> None:
    """Up to its last layer, whose own backward begins with what enters it."""
    order = visits(7, 1, LoopOrder.LAYERS_OUTER, {0}, frozenset({1, 2, 4}))
    backward = [f"{v.phase.value[0]}{v.layer}" for v in order if v.phase in (Phase.REPLAY, Phase.BACKWARD)]
    assert backward == ["r4", "b5", "b4", "r1", "r2", "b3", "b2", "b1"]
    assert [v.index for v in order] == list(range(len(order)))
    assert not any(v.last for v in order if v.phase is Phase.REPLAY)


@given(st.integers(2, 12), st.integers(2, 6), st.integers(1, 4), st.sampled_from(LoopOrder))
def test_a_residency_is_consistent(num_layers: int, num_slots: int, micro_batches: int, order: LoopOrder) -> None:
    """Replays it: every visit finds its layer, no slot is refilled before its last visit ended, uploads are few."""
    residency = simulate(num_layers, num_slots, micro_batches, order)
    sequence = visits(num_layers, micro_batches, order)
    held: dict[int, FragmentId] = {}
    last_visit: dict[int, int] = {}
    loads = list(residency.loads)
    for v in sequence:
        while loads and loads[0].visit == v.index:
            load = loads.pop(0)
            assert load.after_visit == last_visit.get(load.slot, -1) < v.index
            held[load.slot] = load.fragment
        slot = residency.slots[v.index][FragmentId(v.layer, 0)]
        assert held[slot] == FragmentId(v.layer, 0)
        last_visit[slot] = v.index
    rounds = 1 if order is LoopOrder.LAYERS_OUTER else micro_batches
    assert len(residency.loads) <= max(num_layers, rounds * (2 * num_layers - num_slots))


@given(st.integers(3, 12), st.integers(2, 5))
def test_uploads_of_one_micro_batch(num_layers: int, num_slots: int) -> None:
    residency = simulate(num_layers, num_slots, 1, LoopOrder.LAYERS_OUTER)
    assert len(residency.loads) == max(num_layers, 2 * num_layers - num_slots)


def test_a_slot_is_free_once_nobody_comes_back_for_it() -> None:
    residency = simulate(4, 2, 1, LoopOrder.LAYERS_OUTER)
    phases = [v.phase for v in visits(4, 1, LoopOrder.LAYERS_OUTER)]
    assert phases[3] is Phase.HEAD
    # Visits 0 and 1 make room for layers 2 and 3; 2 stays for its backward; the head's slot is refilled.
    assert [sorted(f) for f in residency.released] == [[0], [1], [], [1], [0], [1], [0]]


def test_too_few_slots_are_refused() -> None:
    tied = [(FragmentId(0, 0), FragmentId(1, 0))]
    fragments = {FragmentId(0, 0): 100, FragmentId(1, 0): 200}
    with pytest.raises(CapacityError, match="no slot for fragment 0 of layer 1"):
        plan_residency(tied, fragments, dict.fromkeys(fragments, "edge"), [SlotSpec("edge", 100)] * 2)
