"""Manages slots, the byte regions of device memory that fragments stream through, and asserts their states."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch

from megatrain_ray.errors import MegatrainError


class SlotState(Enum):
    FREE = "holds nothing anybody may read"
    FILLING = "a copy into it was submitted or is about to be"
    READY = "holds a fragment; readable after its arrival event"
    IN_USE = "bound to a template; a graph or kernel may read it"


_ALLOWED = {
    SlotState.FREE: {SlotState.FILLING},
    SlotState.FILLING: {SlotState.READY},
    SlotState.READY: {SlotState.IN_USE, SlotState.FREE},
    SlotState.IN_USE: {SlotState.READY, SlotState.FREE},
}


class SlotStateError(MegatrainError):
    """Reports that a slot was used against its protocol: a bug in the engine, never in the input."""


@dataclass
class Slot:
    """Holds one region of device memory and its state, which `SlotRing.to` changes."""

    region: torch.Tensor
    state: SlotState = SlotState.FREE
    holder: str = ""  # name of the fragment that it holds, for messages


class SlotRing:
    """Holds all slots of a plan, cut from one allocation.

    State changes come from two threads: the event loop's and the compute thread.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: Sequence[int], *, poison: bool = False) -> None:
        """Cut the slots from `memory`.

        memory: 1-D uint8, at least `sum(slot_bytes)`.
        poison: fill released slots with NaN.
        """
        self._lock = threading.Lock()
        self._poison = poison
        starts = accumulate(slot_bytes, initial=0)
        self._slots = [Slot(memory[start : start + size]) for start, size in zip(starts, slot_bytes, strict=False)]

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def to(self, index: int, state: SlotState, holder: str) -> None:
        """Change the state. Raises SlotStateError unless the protocol allows it. FREE forgets the holder."""
        with self._lock:
            slot = self._slots[index]
            if state not in _ALLOWED[slot.state]:
                by = f" by {slot.holder}" if slot.holder else ""
                raise SlotStateError(
                    f"slot {index} is {slot.state.name}{by}; {holder} cannot make it {state.name}, only "
                    f"{' or '.join(sorted(s.name for s in _ALLOWED[slot.state]))}"
                )
            slot.state = state
            slot.holder = "" if state is SlotState.FREE else holder
            if self._poison and state is SlotState.FREE:
                slot.region.detach().fill_(0xFF)  # NaN in bf16 and fp32
