"""Searches for the fastest plan of each split into micro-batches. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, cached_property

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.memory.chunk_sizes import is_long, may_be_small, may_chunk, mlp_chunk_tokens
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.engine.planner.search.candidates import VERY_FEW_BLOCKS, candidates, splits
from megatrain_ray.engine.planner.search.fill_device import Filling, disk_variants, fewest_layers
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from megatrain_ray.engine.planner.search.search_results import Found, SearchResults
from megatrain_ray.errors import ConfigError

LATE_SHARES = tuple(eighths / 8 for eighths in range(1, 9))  # shares that are tried, of the layers that shards update
FEW_BLOCKS = 32  # with more blocks, one more or less of them on the device changes a step by less than 3 %


class SplitSearch:
    """Tries the candidates of one split one after the other, each only if it may be better than what was found."""

    def __init__(
        self, basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, found: SearchResults,
    ) -> None:  # fmt: skip
        """List the candidates of the split.

        request: with the split.
        activations: bytes for one of its micro-batches.
        found: collects the plans that fit.

        Raises ConfigError if as many layers as requested cannot live on the device.
        """
        self._basis = basis
        self._machine = machine
        self._request = request
        self._activations = activations
        self._found = found
        # Layers that Muon trains stay on the host, because the shards own their momenta.
        self._residency_order = tuple(i for i, layer in enumerate(basis.layout.layers) if not layer.num_muon)
        self._fixed = self._fixed_count()
        self._candidates = list(candidates(basis.structure, request))
        if machine.hbm_bytes is None:  # the device's memory is the host's, so only a disk would make room
            self._candidates = [c for c in self._candidates if c.kept is Tier.HBM or machine.spill is not None]
        if machine.spill is not None:
            moving = [c for c in self._candidates if Tier.HOST in (c.boundaries, c.kept)]
            self._candidates += [candidate._replace(spills_activations=True) for candidate in moving]
        self._tried: set[Candidate] = set()
        self._builder = PlanBuilder(basis.structure, basis.layout, activations, machine, request)
        self._fewest_of = cache(self._count_fewest)
        self._leaving: dict[Candidate, float] = {}
        self._compute_s: dict[tuple[LoopOrder, ActivationPolicy, tuple[float, float], int], float] = {}

    def run(self) -> None:
        for candidate in self._candidates:
            if not self._has_room(candidate) or not self._is_worth_filling(candidate):
                continue
            for residency_order in self._orders:
                filling = self._filling(candidate, residency_order)
                for filled in filling.candidates(self._may_be_chosen, self._may_spill, self._leaving_forwards):
                    self._try(filled)

    def vary_disk(self, candidate: Candidate) -> None:
        """Try variants of a candidate of this split that spills data of shards."""
        for other in disk_variants(self._builder, candidate):
            self._try(other)

    def vary_updates(self, candidate: Candidate) -> None:
        """Try to update the first layers of a candidate of this split late, if the host has room for all gradients."""
        num_updated = len(self._builder.in_memory(candidate).layer_order)
        for share in LATE_SHARES:
            other = candidate._replace(num_updated_late=round(share * num_updated))
            if other.num_updated_late and self._builder.missing_ram(other) <= 0:
                self._try(other)

    def _is_worth_filling(self, candidate: Candidate) -> bool:
        if not self._found.may_be_beaten_in(self._least_compute_s(self._filling(candidate, self._residency_order))):
            return False
        return not self._waits_needlessly(candidate) and not self._spills_needlessly(candidate)

    def _may_be_chosen(self, candidate: Candidate) -> bool:
        return self._found.may_be_chosen(self._bounds(self._builder.without_rows(candidate)))

    def _leaving_forwards(self, candidate: Candidate) -> float:
        """Return the number of forwards of a block during which one block's kept activations leave the device.

        Slots, tiers of weights and numbers of blocks in `candidate` make no difference.
        """
        names = "order", "activations", "activation_budget", "tail_budget", "boundaries", "kept"
        every = {"num_offloading": self._builder.num_blocks, **{name: getattr(candidate, name) for name in names}}
        alike = self._candidates[0]._replace(**every)
        if alike not in self._leaving:
            plan = self._builder.in_memory(alike)
            room = self._bounds(plan).forward_bytes - plan.host_boundary_bytes
            self._leaving[alike] = plan.host_kept_bytes / room if room > 0 else math.inf
        return self._leaving[alike]

    def _may_spill(self, num_bytes: int) -> bool:
        """Return whether a plan may be chosen that writes so many bytes to disk in a step and reads them back."""
        rate = max(self._basis.disk_bytes_per_s, self._basis.activations_per_s)
        return self._found.may_be_beaten_in(2 * num_bytes / rate)

    def _try(self, candidate: Candidate) -> None:
        if candidate in self._tried or not self._may_be_chosen(candidate):
            return
        plan = self._builder.plan(candidate)
        prediction = predict(plan, self._basis, self._activations)
        self._tried.add(candidate)
        self._found.add(Found(prediction.step_s, replace(plan, prediction=prediction), candidate, self))

    def _has_room(self, candidate: Candidate) -> bool:
        """Return whether the device may have room for what the candidate computes."""
        limit = self._machine.hbm_bytes
        if limit is None:
            return True
        # Not for candidates that offload kept activations: these may keep more, or less, than with nothing offloaded.
        if candidate.kept is Tier.HBM and self._builder.least_device_bytes(candidate) > limit:
            return False
        return self._entering_bytes(candidate) <= limit

    def _entering_bytes(self, candidate: Candidate) -> int:
        """Return a lower bound of the bytes of layer inputs that wait on the device.

        Only the inputs of the first layers of all segments count.
        """
        if candidate.boundaries is not Tier.HBM:
            return 0
        num_live = self._request.num_micro_batches if candidate.order is LoopOrder.LAYERS_OUTER else 1
        first = max(1, self._basis.layout.lowest_trained)
        return num_live * sum(self._activations.boundary[first :: candidate.segment])

    def smallest(self) -> Iterator[Plan]:
        """Yield the plans that may take the least memory: for every candidate those with as little as it can take."""
        every = (self._filling(candidate, self._residency_order).smallest() for candidate in self._candidates)
        return map(self._builder.plan, dict.fromkeys(itertools.chain.from_iterable(every)))

    @cached_property
    def _orders(self) -> Iterable[tuple[int, ...]]:
        """Return the orders in which layers come to live on the device.

        - The order of a forward, because the first layers' updates are waited for first.
        - Embedding and head last: in their place there may be room for a block, which would be uploaded twice.
        - The smallest layers first, if there is no such room.
        - With very few blocks, also the last layers first.

        With many blocks only the first order is used. If there is a disk, embedding and head first is tried, too: slots
        for blocks only may be much smaller, and leave more room.
        """
        layer_bytes = self._builder.resident_bytes
        ends = 0, len(layer_bytes) - 1
        if self._fixed is not None:
            return (self._residency_order,)
        if self._has_many_blocks:
            ends_first = tuple(sorted(self._residency_order, key=lambda i: i not in ends))
            return (self._residency_order, ends_first) if self._machine.spill else (self._residency_order,)
        ends_last = tuple(sorted(self._residency_order, key=lambda i: i in ends))
        smallest_first = tuple(sorted(self._residency_order, key=lambda i: layer_bytes[i]))
        last_first = (self._residency_order[::-1],) if self._builder.num_blocks <= VERY_FEW_BLOCKS else ()
        return dict.fromkeys((self._residency_order, ends_last, smallest_first, *last_first))

    @property
    def _has_many_blocks(self) -> bool:
        return self._builder.num_blocks > FEW_BLOCKS

    def _filling(self, candidate: Candidate, residency_order: tuple[int, ...]) -> Filling:
        is_fixed = self._fixed is not None
        return Filling(self._builder, candidate, residency_order, self._fewest, fixed=is_fixed)

    def _fixed_count(self) -> int | None:
        """Return how many layers must live on the device; None if any number may.

        Raises ConfigError if that many cannot.
        """
        count = self._request.hbm_layers
        if count is None:
            return None if self._machine.device == "cuda" else 0
        if count > len(self._residency_order):
            raise ConfigError(
                f"hardware.hbm_layers: {count} layers cannot live on the device, only {len(self._residency_order)} of "
                f"{len(self._basis.layout.layers)} (embedding and head are layers, too; what Muon trains stays on "
                "the host)"
            )
        return count

    def _waits_needlessly(self, candidate: Candidate) -> bool:
        """Return whether gradients wait on the device, which they would leave late, though the host has room for them.

        With few blocks this may be faster all the same: the regions that gradients leave from, sums of whole blocks,
        are not needed then.
        """
        if candidate.gradients is not Tier.HBM or not self._found.plans or not self._has_many_blocks:
            return False
        on_host = candidate._replace(gradients=Tier.HOST)
        return not self._fewest(on_host, self._residency_order) and not self._builder.spilled(on_host).of_shards

    def _spills_needlessly(self, candidate: Candidate) -> bool:
        """Return whether activations may spill, or take memory that state needs, although a plan fits without that.

        Only with short sequences: a layer's activations then take longer to move to disk than the layer takes to
        compute, and so does state that would spill instead.
        """
        if not self._found.plans or is_long(self._request.seq_len):
            return False
        crowds = candidate.kept is Tier.HOST and self._machine.spill is not None
        return candidate.spills_activations or (crowds and self._builder.missing_ram(candidate) > 0)

    def _fewest(self, candidate: Candidate, residency_order: tuple[int, ...]) -> int:
        """Return how many layers must live on the device.

        Slots and what is kept on the device make no difference to the host. So one candidate stands for all that differ
        only in these.
        """
        names = "order", "sums", "gradients", "boundaries", "spills_activations"
        alike = self._candidates[0]._replace(**{name: getattr(candidate, name) for name in names})
        return self._fewest_of(alike, residency_order)

    def _count_fewest(self, candidate: Candidate, residency_order: tuple[int, ...]) -> int:
        return fewest_layers(self._builder, candidate, residency_order) if self._fixed is None else self._fixed

    def _least_compute_s(self, filling: Filling) -> float:
        """Return the seconds of computing with as much kept as possible; slots and tiers make no difference to it."""
        candidate = filling.candidate
        budgets = candidate.activation_budget, candidate.tail_budget
        key = candidate.order, candidate.activations, budgets, candidate.segment
        if key not in self._compute_s:
            self._compute_s[key] = self._bounds(self._builder.in_memory(filling.most_kept)).compute_s
        return self._compute_s[key]

    def _bounds(self, plan: Plan) -> Bounds:
        return Bounds(plan, self._basis, self._activations)


def split_searches(
    basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, found: SearchResults, *,
    least_memory: bool = False,
) -> Iterator[SplitSearch]:  # fmt: skip
    """Yield a search for each split.

    There is a second one with small logits on a small device, and with MLPs in chunks if micro-batches are large.

    found: collects the plans that fit.
    least_memory: leave out the first one where the second one takes less memory.
    """
    for split in splits(request):
        split_activations = activations.times(split.micro_batch_size // request.micro_batch_size)
        is_small = may_be_small(machine.hbm_bytes)
        if not (is_small and least_memory):
            yield SplitSearch(basis, machine, split, split_activations, found)
        if is_small:
            yield SplitSearch(basis, machine, replace(split, small_logits=True), split_activations, found)
        tokens = split.micro_batch_size * split.seq_len
        if not may_chunk(tokens, split.seq_len, has_disk=machine.spill is not None):
            continue
        chunk_tokens = mlp_chunk_tokens(basis.structure, tokens)
        if chunk_tokens and (in_chunks := split_activations.in_chunks()):
            yield SplitSearch(basis, machine, replace(split, mlp_chunk_tokens=chunk_tokens), in_chunks, found)
