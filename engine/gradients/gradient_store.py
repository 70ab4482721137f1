"""Accumulates gradients on the device, in flat slots, and computes exact norms. Compute thread only.

gradient_offloader.py moves gradients between these slots and the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.device.ranks import OneRank, RankParts, Ranks
from megatrain_ray.engine.gradients.gradient_offloader import Departure, Fetch
from megatrain_ray.engine.gradients.gradient_slots import GradientSlots, wait_for
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.chunked_loss import OpenSum
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.virtual_clock import SUM_OVER_GPUS, Op

SMALL_ELEMENTS = 1 << 20  # a guess: a GPU should copy fewer elements in less time than the launch takes


class _Sum(NamedTuple):
    """Holds a layer's gradient as a padded 1-D tensor, and a view of it for each parameter, by name."""

    flat: torch.Tensor
    views: Mapping[str, torch.Tensor]


class Completed(NamedTuple):
    """Holds what a backward leaves for the update.

    sums: complete gradients that wait on the device, by layer.
    norms: gradient norms by parameter.
    """

    sums: Mapping[int, _Sum]
    norms: Mapping[str, torch.Tensor]


class GradientStore:
    """Holds one flat sum for each layer that trains something.

    A sum exists from the first contribution until the gradient is offloaded or taken by the update.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, device: Device, ranks: Ranks | None = None, *, poison: bool
    ) -> None:
        """Allocate the gradient slots that the plan asks for.

        ranks: the ranks of the run; None: there is one.
        """
        self._ranks = ranks or OneRank()
        self._parts = RankParts(layout, self._ranks.rank, self._ranks.size)
        self._sums_whole = plan.sums_whole
        # Longer than the transfer's own limit: that error names what is stuck, so it should come first.
        self._timeout_s = plan.update_deadline_s + DEADLINE_S

        leaving = [layer for layer in layout.updated if layer not in plan.gradients_on_device]

        self.waits_on_host = plan.gradients.sums is Tier.HOST
        of_sums = layout.updated if self.waits_on_host else leaving

        def slots(sizes: Sequence[int], layers: Sequence[int], dtype: torch.dtype) -> GradientSlots:
            needed = {i: layout.layers[i].trained.size * dtype.itemsize for i in reversed(layers)}
            return GradientSlots(device, sizes, needed, self._timeout_s, poison=poison)

        self._layout = layout
        self._device = device
        self._sums = slots(plan.slots.gradient_bytes, of_sums, plan.gradients.accumulate_dtype)
        self._sum_dtype = plan.gradients.accumulate_dtype
        self._leaving = (
            slots(plan.slots.rounded_bytes, leaving, plan.gradients.offload_dtype) if plan.slots.rounded_bytes else None
        )
        self._offload_dtype = plan.gradients.offload_dtype
        self._waiting = plan.gradients_on_device
        # Of these, layers whose partial sums are offloaded between micro-batches. The last contribution moves the sum
        # to the memory in which it waits for the update.
        self._moving = self._waiting if self.waits_on_host else frozenset()
        # Sums that stay on the device between micro-batches get memory for the whole run. Others are allocated in the
        # last visit, from memory that activations have released.
        self._places: dict[int, torch.Tensor] = {}
        if not plan.gradients_allocated_on_demand:
            self._places = {layer: device.allocate(self._num_bytes(layer)) for layer in sorted(self._waiting)}
        self._poison = poison
        self._open: dict[int, _Sum] = {}
        self._added: frozenset[str] = frozenset()
        self._paired = plan.paired_layers
        self._earlier: list[Mapping[str, torch.Tensor | None]] = []  # held back for the next micro-batch's
        self._begins = False  # whether the sum begins with `_earlier`
        self._fetched: dict[int, Fetch] = {}
        self.norms: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._sums.reset()
        if self._leaving is not None:
            self._leaving.reset()
        self._open.clear()
        self._added = frozenset()
        self._earlier, self._begins = [], False
        self._fetched.clear()
        self.norms.clear()

    def fetch(self, layer: int) -> Fetch:
        """Return a request to reload the layer's partial sum. Call before `add`."""
        self._fetched[layer] = self._sums.fetch(layer, self._num_bytes(layer))
        return self._fetched[layer]

    def open_sums(self, layer: int, names: Collection[str], *, first: bool) -> dict[str, OpenSum]:
        """Return the sums of these parameters of the layer, for a caller that adds to them itself.

        Call before `add`, which then leaves the sums of these parameters as they are.
        """
        views = self._total(layer).views
        self._added = frozenset(names)
        return {name: OpenSum(views[name], first) for name in names}

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None], *, first: bool, last: bool) -> None:
        """Add one micro-batch's gradients of a layer. A parameter without a gradient contributes zeros.

        For paired layers, one micro-batch's gradients may be held back and added together with the next one's.

        first: whether the sum begins here.
        last: whether the sum ends here.
        """
        if layer in self._paired and not last and not self._earlier:
            self._earlier, self._begins = [gradients], first
            return
        contributions, begins = [*self._earlier, gradients], first or self._begins
        self._earlier, self._begins = [], False
        total = self._total(layer)
        moves = last and layer in self._moving
        out = self._begin_waiting(layer) if moves else total
        self._add(total.views, contributions, out.views, begins=begins)
        self._added = frozenset()
        if moves:
            self._sums.leave(layer).set_result(self._device.record())

    def _add(
        self,
        total: Mapping[str, torch.Tensor],
        contributions: Sequence[Mapping[str, torch.Tensor | None]],
        out: Mapping[str, torch.Tensor],
        *,
        begins: bool,
    ) -> None:
        """Compute out = total + one or two contributions, for each parameter.

        begins: whether there is no total yet.
        """
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, target in out.items():
            values = [value for of_one in contributions if (value := of_one.get(name)) is not None]
            if name in self._added or not (values or begins):
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

    def suspend(self, layer: int) -> Departure:
        """Return a request to offload the layer's partial sum to the host, where it stays until `fetch`."""
        flat = self._open.pop(layer).flat
        return Departure(layer, flat, self._device.record(), self._sums.leave(layer), final=False)

    def finish(self, layer: int) -> Departure | None:
        """Complete a layer's gradient; return a request to offload this rank's part of it.

        Sums the gradient over the ranks and rounds it if the plan says so. Measures each parameter's norm, in FP32, of
        the values that the optimizer receives. Returns None if the gradient waits on the device: `take` or `depart`
        gets it later.
        """
        own, flat, layout = self._parts.gradient_span(layer), self._open[layer].flat, self._layout.layers[layer]
        if self._ranks.size > 1:
            with self._device.compute(Op(SUM_OVER_GPUS, layer, num_bytes=flat.nbytes)):
                self._ranks.sum_part(flat, layout.trained if self._sums_whole(layer) else own)
        if layer in self._waiting:
            self._round_in_place(layer)
            self._measure(layer, flat)
            return None
        total, done = self._rounded(layer)
        self._measure(layer, total)
        leaving = total[own.start : own.stop]
        return Departure(layer, leaving, self._device.record(), done, final=not layout.num_muon)

    def completed(self) -> Completed:
        """Return what the last backward has left, for `restore`."""
        return Completed(dict(self._open), dict(self.norms))

    def restore(self, completed: Completed) -> None:
        """Put the store into the state in which a backward left it, as returned by `completed`.

        The tensors are the same as when it was made. Their values may be those of another step.
        """
        self._open, self.norms = dict(completed.sums), dict(completed.norms)

    def take(self, layer: int) -> torch.Tensor:
        """Return the complete gradient of a layer whose gradient waits on the device: 1-D, padded.

        It is valid for work that is submitted next.
        """
        return self._open.pop(layer).flat

    def depart(self, layer: int) -> Departure:
        """Return a request to offload a complete gradient that waited on the device.

        No event protects its memory. That memory is reused in the next step's backward at the earliest, and by then
        every update has run, because a forward needs every update.
        """
        own = self._parts.gradient_span(layer)
        flat = self._open.pop(layer).flat[own.start : own.stop]
        return Departure(layer, flat, self._device.record(), Future(), final=True)

    def _measure(self, layer: int, flat: torch.Tensor) -> None:
        """Record the norms of this rank's part of the layer's gradient. `total_norm` adds up all ranks."""
        views = self._parts.views(layer, flat)
        # As clip_grad_norm_ computes norms: on a GPU a few launches for all parameters.
        norms = torch._foreach_norm(list(views.values()), 2.0, dtype=torch.float32) if views else ()
        self.norms.update(zip(views, norms, strict=True))

    def _round_in_place(self, layer: int) -> None:
        """Round the layer's sum to values of the offload dtype, and keep the dtype of the sum.

        An update computes the same from both.
        """
        if self._offload_dtype is not self._sum_dtype:
            for view in self._open[layer].views.values():
                view.copy_(view.to(self._offload_dtype))

    def recall(self, layer: int) -> Fetch:
        """Return a request to reload this rank's part of the layer's complete gradient from the host.

        Call when no sum is on the device any more.
        """
        num_bytes = self._parts.gradient_span(layer).size * self._offload_dtype.itemsize
        self._fetched[layer] = self._sums.fetch(layer, num_bytes)
        return self._fetched[layer]

    def recalled(self, layer: int) -> torch.Tensor:
        """Return the gradient requested by `recall` as a 1-D tensor.

        It stays valid until `let_go(layer)`.
        """
        fetch = self._fetched.pop(layer)
        wait_for(self._device, fetch.done, "h2d", self._timeout_s)
        return fetch.region.view(self._offload_dtype)

    def let_go(self, layer: int) -> None:
        """Release the recalled gradient after the work submitted so far, which is the last to read it."""
        self._sums.leave(layer).set_result(self._device.record())

    def total_norm(self) -> torch.Tensor:
        """Return the norm of the parameters' norms, in the order of `model.parameters()`, as torch does.

        Afterwards `norms` holds the norms of whole parameters, over all ranks.
        """
        if self._ranks.size > 1:
            self._add_norms()
        norms = torch.stack([self.norms[name] for name in self._layout.parameter_order])
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total

    def _add_norms(self) -> None:
        """Combine the norms of all ranks' parts into norms of whole parameters.

        Squares are added in FP64, which can hold the square of every FP32 number.
        """
        names = self._layout.parameter_order
        nothing = torch.zeros((), dtype=torch.float32, device=self._device.torch_device)
        squares = torch.stack([self.norms.get(name, nothing) for name in names]).double().square()
        self._ranks.sum(squares)
        self.norms = dict(zip(names, squares.sqrt().float(), strict=True))

    def _total(self, layer: int) -> _Sum:
        """Return the layer's sum. If there is none, reload the requested one or begin a new one."""
        if layer in self._waiting and layer not in self._moving and layer not in self._open:
            return self._begin_waiting(layer)
        if layer not in self._open:
            fetch = self._fetched.pop(layer, None)
            if fetch is None:
                region = self._sums.take(layer, self._num_bytes(layer))
            else:
                wait_for(self._device, fetch.done, "host_accumulation", self._timeout_s)
                region = fetch.region
            self._open[layer] = self._sum(layer, region.view(self._sum_dtype))
        return self._open[layer]

    def _sum(self, layer: int, flat: torch.Tensor) -> _Sum:
        return _Sum(flat, self._layout.layers[layer].trained_views(flat))

    def _begin_waiting(self, layer: int) -> _Sum:
        """Begin a sum in the memory where the gradient waits for its update. It holds no values yet."""
        self._open[layer] = self._sum(layer, self._place(layer).view(self._sum_dtype))
        return self._open[layer]

    def _place(self, layer: int) -> torch.Tensor:
        """Return uint8 memory for a sum that waits on the device."""
        place = self._places.get(layer)
        if place is None:
            place = torch.empty(self._num_bytes(layer), dtype=torch.uint8, device=self._device.torch_device)
        return place.fill_(0xFF) if self._poison else place

    def _num_bytes(self, layer: int) -> int:
        return self._layout.layers[layer].trained.size * self._sum_dtype.itemsize

    def _rounded(self, layer: int) -> tuple[torch.Tensor, Future[Event]]:
        """Return the padded 1-D gradient to offload, and the future that is to get the event of its departure.

        With several ranks only this rank's part of the tensor has meaningful values.
        """
        total = self._open.pop(layer).flat
        if self._leaving is None:
            return total, self._sums.leave(layer)
        num_bytes = total.numel() * self._offload_dtype.itemsize
        leaving = self._leaving.take(layer, num_bytes).view(self._offload_dtype)
        # Copy views, not the whole tensor: the padding was never written.
        views = self._parts.views
        _copy(zip(views(layer, leaving).values(), views(layer, total).values(), strict=True))
        self._sums.leave(layer).set_result(self._device.record())  # a fetch into this region waits for it
        return leaving, self._leaving.leave(layer)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first.

    Small ones are copied together: with a launch for each, launches would take most of a small layer's time.
    """
    targets, sources = [], []
    for target, source in pairs:
        if source.numel() < SMALL_ELEMENTS:
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    if targets:
        torch._foreach_copy_(targets, sources)
