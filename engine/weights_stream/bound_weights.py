"""Manages the slots, device memory that fragments of weights stream through, and parameters as views into them.

Autograd saves weights for the backward. A graph that outlives a visit must not own slot memory, because the slot is
refilled. So a saved tensor that lies in a slot is replaced by its position in its *layer*. When the backward asks for
it, it is looked up in the slot that holds the layer then. Weights that live on the device never move, so they need no
lookup.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatrain_ray.engine.layout.flat_layout import Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.residency import FragmentId
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
        """Cut the slots from `memory` (1-D uint8, at least `sum(slot_bytes)`). With `poison`, released ones get NaN."""
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


class SavedWeight(NamedTuple):
    """Identifies a view of a weight: its fragment, its byte offset in the fragment, dtype, size and stride."""

    fragment: FragmentId
    start_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class WeightBindings:
    """Maps fragments to the device memory that holds them now. Compute thread only."""

    def __init__(self, layout: ModelLayout, dtype: torch.dtype, memory: torch.Tensor) -> None:
        """Create it with no fragment bound. All slots are cut from the allocation `memory`."""
        self._layout = layout
        self._dtype = dtype
        self._memories = [_addresses(memory)]
        self._regions: dict[FragmentId, torch.Tensor] = {}
        self._visiting: Mapping[FragmentId, torch.Tensor] = {}
        self._resident: list[tuple[int, FragmentId]] = []  # sorted by address
        self._resident_ids: frozenset[FragmentId] = frozenset()  # on the device for the whole run

    def register_resident(self, memory: torch.Tensor, regions: Mapping[FragmentId, torch.Tensor]) -> None:
        """Bind the fragments that live on the device from now on, in `regions` of their own allocation `memory`."""
        self._memories.append(_addresses(memory))
        self._regions.update(regions)
        self._resident_ids = frozenset(regions)
        self._resident = sorted((region.data_ptr(), fragment) for fragment, region in regions.items())

    @contextmanager
    def bound(self, regions: Mapping[FragmentId, torch.Tensor]) -> Iterator[None]:
        """Bind fragments for the block, also such as live on the device with other values."""
        resident = {fragment: self._regions[fragment] for fragment in regions if fragment in self._regions}
        self._regions.update(regions)
        self._visiting = regions
        try:
            yield
        finally:
            self._visiting = {}
            for fragment in regions:
                del self._regions[fragment]
            self._regions.update(resident)

    def addresses(self, fragments: Sequence[FragmentId]) -> tuple[int, ...]:
        """Return where these fragments begin. While that stays the same, their parameters are the same views."""
        return tuple([self._region(fragment).data_ptr() for fragment in fragments])

    def fragments_of(self, layer: int, segments: Sequence[Segment]) -> tuple[FragmentId, ...]:
        """Return the fragments that hold these parameters of a layer."""
        return tuple(dict.fromkeys(self._fragment_of(*self._owner_of(layer, segment)) for segment in segments))

    def parameter(self, layer: int, segment: Segment) -> torch.Tensor:
        """Return a leaf tensor that is a view of the slot, for a tied parameter of its owner's slot.

        It requires a gradient if it is trained.
        """
        layer, segment = self._owner_of(layer, segment)
        fragment = self._fragment_of(layer, segment)
        start = self._layout.layers[layer].fragments[fragment.index].start
        # `.data` has a version counter of its own. Otherwise autograd would take an update of other parameters in the
        # same allocation for an update of this one.
        flat = self._region(fragment).data.view(self._dtype)
        return segment.read_view(flat, start).detach().requires_grad_(segment.group.trained)

    def saving(
        self, fragments: Iterable[FragmentId], kept: list[torch.Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which graphs that read these fragments are built.

        Graphs save weights by identity, unless all these fragments live on the device and cannot move. The hooks cost a
        call for each saved tensor.

        fragments: all that the graphs read.
        kept: list that receives every other saved tensor, as a tensor object that only the graph holds.
        """
        if kept is not None:
            return torch.autograd.graph.saved_tensors_hooks(partial(self._pack_own, kept), self._unpack)
        if self._resident_ids.issuperset(fragments):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _owner_of(self, layer: int, segment: Segment) -> tuple[int, Segment]:
        if segment.tied_to is None:
            return layer, segment
        owner = self._layout.owner[segment.tied_to]
        return owner, self._layout.layers[owner].segment(segment.tied_to)

    def _fragment_of(self, layer: int, segment: Segment) -> FragmentId:
        spans = self._layout.layers[layer].fragments
        return FragmentId(layer, next(i for i, s in enumerate(spans) if s.start <= segment.read_start < s.stop))

    def _region(self, fragment: FragmentId) -> torch.Tensor:
        region = self._regions.get(fragment)
        if region is None:
            name = self._layout.layers[fragment.layer].name
            raise SlotStateError(f"fragment {fragment.index} of {name} is needed but in no bound slot")
        return region

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedWeight:
        if isinstance(tensor, FakeTensor):
            return tensor  # a compiler is tracing: it saves no real memory
        address = tensor.data_ptr()
        for addresses in self._memories:  # not any(...): this runs for every saved tensor
            if address in addresses:
                return SavedWeight(*self._locate(address), tensor.dtype, tensor.size(), tensor.stride())
        return tensor

    def _pack_own(self, kept: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor | SavedWeight:
        saved = self._pack(tensor)
        if isinstance(saved, SavedWeight) or isinstance(tensor, FakeTensor):
            return saved
        kept.append(saved.data)  # a new tensor object on the same memory: others may hold the old one
        return kept[-1]

    def _locate(self, address: int) -> tuple[FragmentId, int]:
        """Return the fragment that holds this address, and the byte offset in it."""
        before = bisect_right(self._resident, (address, _LAST)) - 1
        resident = [self._resident[before][1]] if before >= 0 else []
        for fragment in (*self._visiting, *resident):
            region = self._regions[fragment]
            start = address - region.data_ptr()
            if 0 <= start < region.nbytes:
                return fragment, start
        raise SlotStateError("autograd saved a tensor of a slot that is bound to no template")

    def _unpack(self, saved: torch.Tensor | SavedWeight) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        flat = self._region(saved.fragment).view(saved.dtype)
        start = flat.storage_offset() + saved.start_bytes // saved.dtype.itemsize
        return flat.as_strided(saved.size, saved.stride, start)


_LAST = FragmentId(1 << 62, 0)  # sorts after every other


def _addresses(memory: torch.Tensor) -> range:
    storage = memory.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
