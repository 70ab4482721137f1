"""Parameters as views into slots, and saved weights packed by identity.

Autograd saves weights for backward. A graph that outlives a visit must not own slot memory: the slot is refilled. So
a saved tensor that lies in a slot is replaced by where it lies in its *layer*, and looked up in whatever slot holds
the layer when backward asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatrain_ray.engine.layout import ModelLayout, Segment
from megatrain_ray.engine.residency import FragmentId
from megatrain_ray.engine.slots import SlotStateError


@dataclass(frozen=True)
class SavedWeight:
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
        self._storages = {memory.untyped_storage().data_ptr()}
        self._regions: dict[FragmentId, torch.Tensor] = {}

    def settle(self, memory: torch.Tensor, regions: Mapping[FragmentId, torch.Tensor]) -> None:
        """Fragments that live on the device, in an allocation of their own, are bound from now on."""
        self._storages.add(memory.untyped_storage().data_ptr())
        self._regions.update(regions)

    @contextmanager
    def bound(self, regions: Mapping[FragmentId, torch.Tensor]) -> Iterator[None]:
        self._regions.update(regions)
        try:
            yield
        finally:
            for fragment in regions:
                del self._regions[fragment]

    def parameter(self, layer: int, segment: Segment) -> torch.Tensor:
        """A leaf that is a view of the slot and wants a gradient if it is trained; a tied parameter is a view of its
        owner's."""
        if segment.tied_to is not None:
            layer = self._layout.owner[segment.tied_to]
            segment = self._layout.layers[layer].segment(segment.tied_to)
        fragment = self._fragment_of(layer, segment)
        start = segment.start - self._layout.layers[layer].fragments[fragment.index].start
        flat = self._region(fragment).view(self._dtype)
        return flat[start : start + segment.numel].view(segment.shape).detach().requires_grad_(segment.group.trained)

    def saving(self) -> AbstractContextManager[None]:
        """Graphs built in this context save weights by identity."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

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
        if isinstance(tensor, FakeTensor) or tensor.untyped_storage().data_ptr() not in self._storages:
            return tensor  # a fake one is seen by a compiler, which makes nothing of a slot
        address = tensor.data_ptr()
        for fragment, region in self._regions.items():
            start = address - region.data_ptr()
            if 0 <= start < region.nbytes:
                return SavedWeight(fragment, start, tensor.dtype, tensor.size(), tensor.stride())
        raise SlotStateError("autograd saved a tensor of a slot that is bound to no template")

    def _unpack(self, saved: torch.Tensor | SavedWeight) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        flat = self._region(saved.fragment).view(saved.dtype)
        return flat[saved.start_bytes // saved.dtype.itemsize :].as_strided(saved.size, saved.stride)
