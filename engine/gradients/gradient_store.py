"""Accumulates gradients on the device, in flat slots, and computes exact norms. Compute thread only.

gradient_offloader.py moves gradients between these slots and the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.device.ranks import OneRank, RankParts, Ranks
from megatrain_ray.engine.gradients.gradient_offloader import LoadGradient, OffloadGradient
from megatrain_ray.engine.gradients.gradient_state import (
    Accumulator,
    GradientSlots,
    GradientState,
    LayerGradient,
    wait_for,
)
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import OpenSum
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.virtual_clock import SUM_OVER_GPUS, Op

SMALL_ELEMENTS = 1 << 20  # a guess: a GPU should copy fewer elements in less time than the launch takes

Gradients = Mapping[str, torch.Tensor | None]  # by parameter; None: no gradient flowed


class Completed(NamedTuple):
    """Holds what a backward leaves for the update: deferred gradients by layer, norms by parameter."""

    deferred: Mapping[int, Accumulator]
    norms: Mapping[str, torch.Tensor]


class GradientStore:
    """Holds one gradient for each layer that trains something, from its first contribution until its update.

    `GradientState` says where a layer's gradient is. Each method raises GradientStateError if it is not in the state
    that the method needs.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, device: Device, ranks: Ranks | None = None, *, poison: bool
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._device = device
        self._ranks = ranks or OneRank()
        self._parts = RankParts(layout, self._ranks.rank, self._ranks.size)
        self._poison = poison
        # Longer than the transfer's own limit: that error names what is stuck, so it should come first.
        self._timeout_s = plan.update_deadline_s + DEADLINE_S
        self._sum_dtype, self._offload_dtype = plan.gradients.accumulate_dtype, plan.gradients.offload_dtype
        self._deferred_layers = plan.gradients_on_device
        offloaded = [layer for layer in layout.updated if layer not in self._deferred_layers]
        # Deferred layers whose partial sums are offloaded between micro-batches. The last contribution moves the sum
        # to the memory in which it waits for the update.
        self._moved_layers = self._deferred_layers if plan.gradients.sums is Tier.HOST else frozenset()
        summed = layout.updated if plan.gradients.sums is Tier.HOST else offloaded
        self._sum_slots = self._slots(plan.slots.gradient_bytes, summed, self._sum_dtype)
        self._rounded_slots = (  # where complete sums are rounded to; None: they are offloaded as they are
            self._slots(plan.slots.rounded_bytes, offloaded, self._offload_dtype) if plan.slots.rounded_bytes else None
        )
        # Deferred gradients whose sums stay on the device between micro-batches have memory for the whole run. Others
        # are allocated in the last visit, from memory that activations have released.
        self._settles = plan.settles
        self._deferred_memory: dict[int, torch.Tensor] = {}
        if not plan.gradients_allocated_on_demand:
            self._deferred_memory = {i: device.allocate(self._num_bytes(i)) for i in sorted(self._deferred_layers)}
        self.begin()

    def _slots(self, sizes: Sequence[int], layers: Sequence[int], dtype: torch.dtype) -> GradientSlots:
        needed = {i: self._layout.layers[i].trained.size * dtype.itemsize for i in reversed(layers)}
        return GradientSlots(self._device, sizes, needed, self._timeout_s, poison=self._poison)

    def begin(self) -> None:
        """Prepare for a step: all gradients are EMPTY."""
        self._sum_slots.reset()
        if self._rounded_slots is not None:
            self._rounded_slots.reset()
        self._layers = [LayerGradient(layer.name) for layer in self._layout.layers]
        self._added_by_caller: frozenset[str] = frozenset()
        self._held_back: Gradients | None = None  # the first of a pair of micro-batches, of the layer that is visited
        self.norms: dict[str, torch.Tensor] = {}

    def open_sums(self, layer: int, names: Collection[str]) -> dict[str, OpenSum]:
        """Return the sums of these parameters of the layer, for a caller that adds to them itself.

        Call before `add`, which then leaves the sums of these parameters as they are.
        """
        total = self._accumulator(layer)
        self._added_by_caller = frozenset(names)
        begins = self._layers[layer].state is GradientState.ALLOCATED
        return {name: OpenSum(total.views[name], begins) for name in names}

    def add(self, layer: int, gradients: Gradients, *, last: bool) -> None:
        """Add one micro-batch's gradients of a layer. A parameter without a gradient contributes zeros.

        For paired layers, one micro-batch's gradients may be held back and added together with the next one's.

        last: whether the sum ends here.
        """
        if layer in self._plan.paired_layers and not last and self._held_back is None:
            self._held_back = gradients
            return
        contributions = [gradients] if self._held_back is None else [self._held_back, gradients]
        self._held_back = None
        gradient = self._layers[layer]
        total = out = self._accumulator(layer)
        moves = last and layer in self._moved_layers
        if moves:
            gradient.accumulator = out = self._views(layer, self._memory_of_deferred(layer))
        self._add(total.views, contributions, out.views, begins=gradient.state is GradientState.ALLOCATED)
        gradient.state = GradientState.ACCUMULATING
        self._added_by_caller = frozenset()
        if moves:
            self._sum_slots.release(layer).set_result(self._device.record())

    def _add(
        self, total: Mapping[str, torch.Tensor], contributions: Sequence[Gradients], out: Mapping[str, torch.Tensor], *,
        begins: bool,
    ) -> None:  # fmt: skip
        """Compute out = total + one or two contributions, for each parameter; without total if the sum `begins`."""
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, target in out.items():
            values = [value for gradients in contributions if (value := gradients.get(name)) is not None]
            if name in self._added_by_caller or not (values or begins):
                if target is not total[name]:
                    copied.append((target, total[name]))
            elif len(values) == 2:
                self._device.add_two(None if begins else total[name], values[0], values[1], target)
            elif values and begins:
                copied.append((target, values[0]))
            elif values:
                self._device.add(total[name], values[0], target)
            else:
                target.zero_()
        _copy(copied)

    def offload_partial(self, layer: int) -> OffloadGradient:
        """Return a request to offload the layer's partial sum to the host, where it stays until `load_partial`."""
        gradient = self._layers[layer]
        gradient.to(GradientState.PARTIAL_OFFLOADED, "offload its partial sum", GradientState.ACCUMULATING)
        after, done = self._device.record(), self._sum_slots.release(layer)
        return OffloadGradient(layer, gradient.pop_flat(), after, done, final=False)

    def load_partial(self, layer: int) -> LoadGradient:
        """Return a request to load the layer's partial sum. Call before `add`."""
        gradient = self._layers[layer]
        gradient.to(GradientState.LOADING_PARTIAL, "load its partial sum", GradientState.PARTIAL_OFFLOADED)
        gradient.load = self._sum_slots.load(LoadGradient, layer, self._num_bytes(layer))
        return gradient.load

    def finalize(self, layer: int) -> OffloadGradient | None:
        """Complete a layer's gradient; return a request to offload this rank's part of it.

        Sums the gradient over the ranks and rounds it if the plan says so. Measures each parameter's norm, in FP32, of
        the values that the optimizer receives. Returns None if the gradient waits on the device: `pop_deferred` or
        `offload_deferred` gets it later.
        """
        gradient, layout = self._layers[layer], self._layout.layers[layer]
        is_deferred = layer in self._deferred_layers
        after = GradientState.DEFERRED if is_deferred else GradientState.OFFLOADED
        gradient.to(after, "complete it", GradientState.ACCUMULATING)
        total = gradient.accumulator
        assert total is not None  # by its state
        own = self._parts.gradient_span(layer)
        if self._ranks.size > 1:
            with self._device.compute(Op(SUM_OVER_GPUS, layer, num_bytes=total.flat.nbytes)):
                self._ranks.sum_part(total.flat, layout.trained if self._plan.sums_whole(layer) else own)
        if is_deferred:
            if self._offload_dtype is not self._sum_dtype:  # round, in the dtype of the sum: updates compute the same
                for view in total.views.values():
                    view.copy_(view.to(self._offload_dtype))
            self._measure(layer, total.flat)
            return None
        flat, done = self._rounded(layer, gradient.pop_flat())
        self._measure(layer, flat)
        leaving = flat[own.start : own.stop]
        return OffloadGradient(layer, leaving, self._device.record(), done, final=not layout.num_muon)

    def completed(self) -> Completed:
        """Return what the last backward has left, for `restore`."""
        sums = {i: layer.accumulator for i, layer in enumerate(self._layers) if layer.accumulator is not None}
        return Completed(sums, dict(self.norms))

    def restore(self, completed: Completed) -> None:
        """Put the store into the state in which a backward left it. Tensors are the same; their values may be newer."""
        for layer, accumulator in completed.deferred.items():
            self._layers[layer].state = GradientState.DEFERRED
            self._layers[layer].accumulator = accumulator
        self.norms = dict(completed.norms)

    def pop_deferred(self, layer: int) -> torch.Tensor:
        """Return the complete gradient of a layer that the device updates next: 1-D, padded."""
        gradient = self._layers[layer]
        gradient.to(GradientState.RELEASED, "update the layer on the device", GradientState.DEFERRED)
        return gradient.pop_flat()

    def offload_deferred(self, layer: int) -> OffloadGradient:
        """Return a request to offload a complete gradient that waited on the device.

        No event protects its memory. That memory is reused in the next step's backward at the earliest, and by then
        every update has run, because a forward needs every update.
        """
        gradient, own = self._layers[layer], self._parts.gradient_span(layer)
        gradient.to(GradientState.OFFLOADED, "offload it after the backward", GradientState.DEFERRED)
        flat = gradient.pop_flat()[own.start : own.stop]
        return OffloadGradient(layer, flat, self._device.record(), Future(), final=True)

    def _measure(self, layer: int, flat: torch.Tensor) -> None:
        """Record the norms of this rank's part of the layer's gradient. `total_norm` adds up all ranks."""
        views = self._parts.views(layer, flat)
        # As clip_grad_norm_ computes norms: on a GPU a few launches for all parameters.
        norms = torch._foreach_norm(list(views.values()), 2.0, dtype=torch.float32) if views else ()
        self.norms.update(zip(views, norms, strict=True))

    def reload_final(self, layer: int) -> LoadGradient:
        """Return a request to load this rank's part of the complete gradient, when no sum is on the device any more."""
        gradient = self._layers[layer]
        gradient.to(GradientState.RELOADING, "reload it", GradientState.OFFLOADED)
        num_bytes = self._parts.gradient_span(layer).size * self._offload_dtype.itemsize
        gradient.load = self._sum_slots.load(LoadGradient, layer, num_bytes)
        return gradient.load

    @contextmanager
    def reloaded(self, layer: int) -> Iterator[torch.Tensor]:
        """Yield the gradient requested by `reload_final`, 1-D. Only work submitted in the block may read it."""
        gradient = self._layers[layer]
        gradient.to(GradientState.RELOADED, "read it", GradientState.RELOADING)
        yield self._loaded(gradient, "h2d").view(self._offload_dtype)
        gradient.to(GradientState.RELEASED, "release it", GradientState.RELOADED)
        self._sum_slots.release(layer).set_result(self._device.record())

    def total_norm(self) -> torch.Tensor:
        """Return the norm of the parameters' norms, in the order of `model.parameters()`, as torch does.

        Afterwards `norms` holds the norms of whole parameters, over all ranks.
        """
        if self._ranks.size > 1:
            self._add_norms()
        norms = torch.stack([self.norms[name] for name in self._layout.parameter_order])
        return torch.linalg.vector_norm(norms)  # type: ignore[no-any-return]

    def _add_norms(self) -> None:
        """Combine the norms of all ranks' parts, in FP64, which can hold the square of every FP32 number."""
        names = self._layout.parameter_order
        nothing = torch.zeros((), dtype=torch.float32, device=self._device.torch_device)
        squares = torch.stack([self.norms.get(name, nothing) for name in names]).double().square()
        self._ranks.sum(squares)
        self.norms = dict(zip(names, squares.sqrt().float(), strict=True))

    def _accumulator(self, layer: int) -> Accumulator:
        """Return the layer's device memory. Allocate it, or wait until its partial sum is loaded, if need be."""
        gradient = self._layers[layer]
        if gradient.state is GradientState.EMPTY:
            gradient.state = GradientState.ALLOCATED
            gradient.accumulator = self._views(layer, self._memory_of_sum(layer))
        elif gradient.state is GradientState.LOADING_PARTIAL:
            gradient.state = GradientState.ACCUMULATING
            gradient.accumulator = self._views(layer, self._loaded(gradient, "host_accumulation"))
        gradient.expect("add to it", GradientState.ALLOCATED, GradientState.ACCUMULATING)
        assert gradient.accumulator is not None  # by its state
        return gradient.accumulator

    def _loaded(self, gradient: LayerGradient, cause: str) -> torch.Tensor:
        """Return the region (uint8) that the gradient's last request loads. What is submitted next comes after."""
        assert gradient.load is not None  # by its state
        wait_for(self._device, gradient.load.done, cause, self._timeout_s)
        return gradient.load.region

    def _views(self, layer: int, region: torch.Tensor) -> Accumulator:
        flat = region.view(self._sum_dtype)
        return Accumulator(flat, self._layout.layers[layer].trained_views(flat))

    def _memory_of_sum(self, layer: int) -> torch.Tensor:
        if layer in self._deferred_layers and layer not in self._moved_layers:
            return self._memory_of_deferred(layer)
        return self._sum_slots.allocate(layer, self._num_bytes(layer))

    def _memory_of_deferred(self, layer: int) -> torch.Tensor:
        if (memory := self._deferred_memory.get(layer)) is None:
            with self._device.settling() if self._settles else nullcontext():
                memory = torch.empty(self._num_bytes(layer), dtype=torch.uint8, device=self._device.torch_device)
        return memory.fill_(0xFF) if self._poison else memory

    def _num_bytes(self, layer: int) -> int:
        return self._layout.layers[layer].trained.size * self._sum_dtype.itemsize

    def _rounded(self, layer: int, total: torch.Tensor) -> tuple[torch.Tensor, Future[Event]]:
        """Return the padded 1-D gradient to offload, and the future that is to get the event of its offload.

        With several ranks only this rank's part of the tensor has meaningful values.
        """
        if self._rounded_slots is None:
            return total, self._sum_slots.release(layer)
        num_bytes = total.numel() * self._offload_dtype.itemsize
        rounded = self._rounded_slots.allocate(layer, num_bytes).view(self._offload_dtype)
        # Copy views, not the whole tensor: the padding was never written.
        views = self._parts.views
        _copy(zip(views(layer, rounded).values(), views(layer, total).values(), strict=True))
        self._sum_slots.release(layer).set_result(self._device.record())  # a load into this region waits for it
        return rounded, self._rounded_slots.release(layer)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first. Small ones are copied in one launch."""
    targets, sources = [], []
    for target, source in pairs:
        if source.numel() < SMALL_ELEMENTS:
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    if targets:
        torch._foreach_copy_(targets, sources)
