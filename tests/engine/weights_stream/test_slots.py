from __future__ import annotations

import pickle
from contextlib import nullcontext

import pytest
import torch

from megatrain_ray.engine.weights_stream.bound_weights import SlotRing, SlotState, SlotStateError


def ring(**kwargs: bool) -> SlotRing:
    return SlotRing(torch.zeros(1024, dtype=torch.uint8), [512, 256, 256], **kwargs)


def test_slots_are_cut_from_one_allocation() -> None:
    slots = ring()
    assert [slots[i].region.nbytes for i in range(3)] == [512, 256, 256]
    assert slots[1].region.data_ptr() == slots[0].region.data_ptr() + 512


def test_the_protocol() -> None:
    slots = ring()
    for state in (SlotState.FILLING, SlotState.READY, SlotState.IN_USE, SlotState.READY, SlotState.IN_USE):
        slots.to(0, state, "layers.7")
    slots.to(0, SlotState.FREE, "layers.7")
    assert slots[0].holder == ""
    assert [slots[i].state for i in range(3)] == [SlotState.FREE] * 3


def test_a_slot_in_use_cannot_be_refilled() -> None:
    slots = ring()
    for state in (SlotState.FILLING, SlotState.READY, SlotState.IN_USE):
        slots.to(1, state, "layers.7")
    with pytest.raises(SlotStateError, match=r"slot 1 is IN_USE by layers\.7; layers\.9 cannot make it FILLING"):
        slots.to(1, SlotState.FILLING, "layers.9")


def test_no_state_is_skipped() -> None:
    """From every state only those that follow it can be reached."""
    order = [SlotState.FILLING, SlotState.READY, SlotState.IN_USE]
    follow = {
        SlotState.FREE: {SlotState.FILLING},
        SlotState.FILLING: {SlotState.READY},
        SlotState.READY: {SlotState.IN_USE, SlotState.FREE},
        SlotState.IN_USE: {SlotState.READY, SlotState.FREE},
    }
    for number, (state, allowed) in enumerate(follow.items()):
        for after in SlotState:
            slots = ring()
            for step in order[:number]:
                slots.to(2, step, "layers.7")
            refused = pytest.raises(SlotStateError, match=f"slot 2 is {state.name}")
            with nullcontext() if after in allowed else refused:
                slots.to(2, after, "layers.9")


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(SlotStateError("slot 1")))
    assert isinstance(error, SlotStateError)


def test_poison_fills_what_is_released_with_nan() -> None:
    slots = ring(poison=True)
    for state in (SlotState.FILLING, SlotState.READY, SlotState.FREE):
        slots.to(0, state, "layers.7")
    assert slots[0].region.view(torch.float32).isnan().all()
    assert slots[0].region.view(torch.bfloat16).isnan().all()
    assert not slots[1].region.any()
