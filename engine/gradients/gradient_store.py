"""Gradients on the device: sums over micro-batches in flat slots, and exact norms. Compute thread only.

What moves between these slots and the host is gradient_offloader.py's business.
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

SMALL_ELEMENTS = 1 << 20  # a guess: fewer should take a GPU less time than the launch of their copy


class _Sum(NamedTuple):
    """A layer's gradient: padded, and of each parameter a view of that, by name."""

    flat: torch.Tensor
    views: Mapping[str, torch.Tensor]


class Completed(NamedTuple):
    """What a backward leaves to the update: sums that wait on the device, by layer, and norms by parameter."""

    sums: Mapping[int, _Sum]
    norms: Mapping[str, torch.Tensor]


class GradientStore:
    """One flat sum for each layer of which something is trained, from the first contribution to departure."""

    def __init__(
        self, plan: Plan, layout: ModelLayout, device: Device, ranks: Ranks | None = None, *, poison: bool
    ) -> None:
        """`ranks`: None where there is one."""
        self._ranks = ranks or OneRank()
        self._parts = RankParts(layout, self._ranks.rank, self._ranks.size)
        self._sums_whole = plan.sums_whole
        # The transfer's own bound, which names what is stuck, comes first.
        self._timeout_s = plan.update_deadline_s + DEADLINE_S

        leaving = [layer for layer in layout.updated if layer not in plan.waiting_layers]

        self.waits_on_host = plan.sums is Tier.HOST
        of_sums = layout.updated if self.waits_on_host else leaving

        def slots(sizes: Sequence[int], layers: Sequence[int], dtype: torch.dtype) -> GradientSlots:
            needed = {i: layout.layers[i].trained.size * dtype.itemsize for i in reversed(layers)}
            return GradientSlots(device, sizes, needed, self._timeout_s, poison=poison)

        self._layout = layout
        self._device = device
        self._sums = slots(plan.gradient_slot_bytes, of_sums, plan.accumulation_dtype)
        self._sum_dtype = plan.accumulation_dtype
        self._leaving = slots(plan.leaving_slot_bytes, leaving, plan.wire_dtype) if plan.leaving_slot_bytes else None
        self._wire_dtype = plan.wire_dtype
        self._waiting = plan.waiting_layers
        # Of these the ones whose unfinished sums come and go; the last contribution moves the sum to where it waits.
        self._moving = self._waiting if self.waits_on_host else frozenset()
        # Sums that outlive micro-batches here have a place for good; others take what activations have left.
        self._places: dict[int, torch.Tensor] = {}
        if not plan.gradients_are_brief:
            self._places = {layer: device.allocate(self._num_bytes(layer)) for layer in sorted(self._waiting)}
        self._poison = poison
        self._open: dict[int, _Sum] = {}
        self._added: frozenset[str] = frozenset()
        self._paired = plan.paired_layers
        self._earlier: list[Mapping[str, torch.Tensor | None]] = []  # a micro-batch's that wait for the next one's
        self._begins = False  # the sum begins with them
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
        """Asks for the layer's unfinished sum, ahead of `add`."""
        self._fetched[layer] = self._sums.fetch(layer, self._num_bytes(layer))
        return self._fetched[layer]

    def open_sums(self, layer: int, names: Collection[str], *, first: bool) -> dict[str, OpenSum]:
        """Of these parameters of the layer, for what is added to them before `add`, which then leaves them as they
        are."""
        views = self._total(layer).views
        self._added = frozenset(names)
        return {name: OpenSum(views[name], first) for name in names}

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None], *, first: bool, last: bool) -> None:
        """Adds one micro-batch's gradients of a layer. A parameter that got none contributes zeros.

        `first`: the sum begins here; `last`: and ends here.
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
        """out = total + one or two contributions, by parameter. `begins`: there is no total yet."""
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
        """Lets the unfinished sum go to the host until `fetch`."""
        flat = self._open.pop(layer).flat
        return Departure(layer, flat, self._device.record(), self._sums.leave(layer), final=False)

    def finish(self, layer: int) -> Departure | None:
        """Adds up what the ranks have, rounds where asked, measures each parameter's norm (of what the optimizer
        receives, in FP32), lets this rank's part go. None for one that waits: `take` or `depart` has it."""
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
        """What the backward that is over has left, for `restore`."""
        return Completed(dict(self._open), dict(self.norms))

    def restore(self, completed: Completed) -> None:
        """As if a backward had left this now: the tensors are the same, what is in them may be another step's."""
        self._open, self.norms = dict(completed.sums), dict(completed.norms)

    def take(self, layer: int) -> torch.Tensor:
        """The complete gradient of a layer whose gradient waits, 1-D, padded, for what is submitted next."""
        return self._open.pop(layer).flat

    def depart(self, layer: int) -> Departure:
        """Lets it go to the host. It has left before its place is written again: a forward needs every update."""
        own = self._parts.gradient_span(layer)
        flat = self._open.pop(layer).flat[own.start : own.stop]
        return Departure(layer, flat, self._device.record(), Future(), final=True)

    def _measure(self, layer: int, flat: torch.Tensor) -> None:
        """Of this rank's part: `total_norm` adds up the rest."""
        views = self._parts.views(layer, flat)
        # As clip_grad_norm_ takes them: on a GPU a few launches for all of them.
        norms = torch._foreach_norm(list(views.values()), 2.0, dtype=torch.float32) if views else ()
        self.norms.update(zip(views, norms, strict=True))

    def _round_in_place(self, layer: int) -> None:
        """To values of the type of what leaves, in that of the sum: an update makes the same of both."""
        if self._wire_dtype is not self._sum_dtype:
            for view in self._open[layer].views.values():
                view.copy_(view.to(self._wire_dtype))

    def recall(self, layer: int) -> Fetch:
        """Asks for this rank's part of the layer's complete gradient, which waits on the host, when no sum is on the
        device any more."""
        num_bytes = self._parts.gradient_span(layer).size * self._wire_dtype.itemsize
        self._fetched[layer] = self._sums.fetch(layer, num_bytes)
        return self._fetched[layer]

    def recalled(self, layer: int) -> torch.Tensor:
        """It, 1-D, until `let_go`."""
        fetch = self._fetched.pop(layer)
        wait_for(self._device, fetch.done, "h2d", self._timeout_s)
        return fetch.region.view(self._wire_dtype)

    def let_go(self, layer: int) -> None:
        """What was submitted is the last that reads the recalled gradient."""
        self._sums.leave(layer).set_result(self._device.record())

    def total_norm(self) -> torch.Tensor:
        """The norm of the parameters' norms, in the order of `model.parameters()`, as torch takes it. `norms` are those
        of whole parameters from here on."""
        if self._ranks.size > 1:
            self._add_norms()
        norms = torch.stack([self.norms[name] for name in self._layout.parameter_order])
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total

    def _add_norms(self) -> None:
        """Of all ranks. In FP64, which holds the square of every FP32 number."""
        names = self._layout.parameter_order
        nothing = torch.zeros((), dtype=torch.float32, device=self._device.torch_device)
        squares = torch.stack([self.norms.get(name, nothing) for name in names]).double().square()
        self._ranks.sum(squares)
        self.norms = dict(zip(names, squares.sqrt().float(), strict=True))

    def _total(self, layer: int) -> _Sum:
        """Where the layer's sum is, or begins to be."""
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
        """Where a gradient waits for its update, nothing of it yet."""
        self._open[layer] = self._sum(layer, self._place(layer).view(self._sum_dtype))
        return self._open[layer]

    def _place(self, layer: int) -> torch.Tensor:
        """Bytes for a sum that waits."""
        place = self._places.get(layer)
        if place is None:
            place = torch.empty(self._num_bytes(layer), dtype=torch.uint8, device=self._device.torch_device)
        return place.fill_(0xFF) if self._poison else place

    def _num_bytes(self, layer: int) -> int:
        return self._layout.layers[layer].trained.size * self._sum_dtype.itemsize

    def _rounded(self, layer: int) -> tuple[torch.Tensor, Future[Event]]:
        """What leaves, 1-D, padded; of this rank's part alone there is more than memory."""
        total = self._open.pop(layer).flat
        if self._leaving is None:
            return total, self._sums.leave(layer)
        num_bytes = total.numel() * self._wire_dtype.itemsize
        leaving = self._leaving.take(layer, num_bytes).view(self._wire_dtype)
        # Not the padding: it was never written.
        views = self._parts.views
        _copy(zip(views(layer, leaving).values(), views(layer, total).values(), strict=True))
        self._sums.leave(layer).set_result(self._device.record())  # what is fetched to its place waits for this
        return leaving, self._leaving.leave(layer)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Into the first of each pair. The small ones at once: a launch each is most of the time of a small layer."""
    targets, sources = [], []
    for target, source in pairs:
        if source.numel() < SMALL_ELEMENTS:
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    if targets:
        torch._foreach_copy_(targets, sources)
