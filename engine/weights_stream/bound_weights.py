"""Parameters as views into slots, and saved weights packed by identity.

Autograd saves weights for backward. A graph that outlives a visit must not own slot memory: the slot is refilled. So
a saved tensor that lies in a slot is replaced by where it lies in its *layer*, and looked up in whatever slot holds
the layer when backward asks for it. Weights that live on the device stay where they are: there is nothing to look up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatrain_ray.engine.layout.flat_layout import Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.weights_stream.slot_ring import SlotStateError


class SavedWeight(NamedTuple):
    """A view of a weight: fragment, byte offset in it, geometry."""

    fragment: FragmentId
    start_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class Residents:
    """The fragments that are bound to templates now. Compute thread only."""

    def __init__(self, layout: ModelLayout, dtype: torch.dtype, memory: torch.Tensor) -> None:
        """`memory`: the allocation that all slots were cut from."""
        self._layout = layout
        self._dtype = dtype
        self._memories = [_Bytes.of(memory)]
        self._regions: dict[FragmentId, torch.Tensor] = {}
        self._visiting: Mapping[FragmentId, torch.Tensor] = {}
        self._settled: list[tuple[int, FragmentId]] = []  # by address
        self._living: frozenset[FragmentId] = frozenset()  # on the device for good

    def settle(self, memory: torch.Tensor, regions: Mapping[FragmentId, torch.Tensor]) -> None:
        """Fragments that live on the device, in an allocation of their own, are bound from now on."""
        self._memories.append(_Bytes.of(memory))
        self._regions.update(regions)
        self._living = frozenset(regions)
        self._settled = sorted((region.data_ptr(), fragment) for fragment, region in regions.items())

    @contextmanager
    def bound(self, regions: Mapping[FragmentId, torch.Tensor]) -> Iterator[None]:
        self._regions.update(regions)
        self._visiting = regions
        try:
            yield
        finally:
            self._visiting = {}
            for fragment in regions:
                del self._regions[fragment]

    def addresses(self, fragments: Sequence[FragmentId]) -> tuple[int, ...]:
        """Where these begin. A parameter of theirs is the same view wherever they are the same."""
        return tuple([self._region(fragment).data_ptr() for fragment in fragments])

    def fragments_of(self, layer: int, segments: Sequence[Segment]) -> tuple[FragmentId, ...]:
        """Those that hold the parameters of a layer."""
        return tuple(dict.fromkeys(self._fragment_of(*self._owner_of(layer, segment)) for segment in segments))

    def parameter(self, layer: int, segment: Segment) -> torch.Tensor:
        """A leaf that is a view of the slot and wants a gradient if it is trained; a tied parameter is a view of its
        owner's."""
        layer, segment = self._owner_of(layer, segment)
        fragment = self._fragment_of(layer, segment)
        start = segment.start - self._layout.layers[layer].fragments[fragment.index].start
        # `.data` has a version counter of its own: autograd must not take an update of others that live in the same
        # allocation for one of these.
        flat = self._region(fragment).data.view(self._dtype)
        return flat[start : start + segment.numel].view(segment.shape).detach().requires_grad_(segment.group.trained)

    def saving(
        self, fragments: Iterable[FragmentId], kept: list[torch.Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Graphs built in this context save weights by identity, where some of these fragments, which are all that they
        read, may move. The hooks cost a call for each tensor that is saved. `kept`: gets all else that is saved, as
        tensors that nobody but the graph has."""
        if kept is not None:
            return torch.autograd.graph.saved_tensors_hooks(partial(self._pack_own, kept), self._unpack)
        if self._living.issuperset(fragments):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _owner_of(self, layer: int, segment: Segment) -> tuple[int, Segment]:
        if segment.tied_to is None:
            return layer, segment
        owner = self._layout.owner[segment.tied_to]
        return owner, self._layout.layers[owner].segment(segment.tied_to)

    def _fragment_of(self, layer: int, segment: Segment) -> FragmentId:
        spans = self._layout.layers[layer].fragments
        return FragmentId(layer, next(i for i, s in enumerate(spans) if s.start <= segment.start < s.stop))

    def _region(self, fragment: FragmentId) -> torch.Tensor:
        region = self._regions.get(fragment)
        if region is None:
            name = self._layout.layers[fragment.layer].name
            raise SlotStateError(f"fragment {fragment.index} of {name} is needed but in no bound slot")
        return region

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedWeight:
        if isinstance(tensor, FakeTensor):
            return tensor  # seen by a compiler, which makes nothing of a slot
        address = tensor.data_ptr()
        for start, stop in self._memories:
            if start <= address < stop:
                return SavedWeight(*self._place_of(address), tensor.dtype, tensor.size(), tensor.stride())
        return tensor

    def _pack_own(self, kept: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor | SavedWeight:
        saved = self._pack(tensor)
        if isinstance(saved, SavedWeight) or isinstance(tensor, FakeTensor):
            return saved
        kept.append(saved.data)  # another tensor of the same memory: that itself may be somebody else's too
        return kept[-1]

    def _place_of(self, address: int) -> tuple[FragmentId, int]:
        """The fragment that holds it, and the byte in that."""
        before = bisect_right(self._settled, (address, _LAST)) - 1
        settled = [self._settled[before][1]] if before >= 0 else []
        for fragment in (*self._visiting, *settled):
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


_LAST = FragmentId(1 << 62, 0)  # behind every other in an order


class _Bytes(NamedTuple):
    """Addresses of an allocation."""

    start: int
    stop: int

    @staticmethod
    def of(memory: torch.Tensor) -> _Bytes:
        storage = memory.untyped_storage()
        return _Bytes(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
