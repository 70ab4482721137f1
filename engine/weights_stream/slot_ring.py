"""Manages slots, the byte regions of device memory that fragments stream through, and asserts their states."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum

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


class Slot:
    """Holds one region of device memory and its state.

    holder: name of the fragment that it holds, for messages.
    """

    def __init__(self, index: int, region: torch.Tensor) -> None:
        self.index = index
        self.region = region
        self.state = SlotState.FREE
        self.holder = ""

    def to(self, state: SlotState, holder: str) -> None:
        """Change the state. Raises SlotStateError unless the protocol allows it. FREE forgets the holder."""
        if state not in _ALLOWED[self.state]:
            by = f" by {self.holder}" if self.holder else ""
            raise SlotStateError(
                f"slot {self.index} is {self.state.name}{by}; {holder} cannot make it {state.name}, only "
                f"{' or '.join(sorted(s.name for s in _ALLOWED[self.state]))}"
            )
        self.state = state
        self.holder = "" if state is SlotState.FREE else holder


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
        self._slots: list[Slot] = []
        start = 0
        for index, num_bytes in enumerate(slot_bytes):
            self._slots.append(Slot(index, memory[start : start + num_bytes]))
            start += num_bytes

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def to(self, index: int, state: SlotState, holder: str) -> None:
        with self._lock:
            slot = self._slots[index]
            slot.to(state, holder)
            if self._poison and state is SlotState.FREE:
                slot.region.detach().fill_(0xFF)  # NaN in bf16 and fp32
