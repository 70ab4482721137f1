"""Computes lower bounds for the seconds of a step. They are cheap, so that few plans have to be simulated. Pure.

They bound the schedule that cost/simulate_step.py runs, and must follow what changes there
(tests/engine/planner/search/test_plan_bounds.py).
"""

from __future__ import annotations

from functools import cached_property

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind
from megatrain_ray.engine.plan.activation_moves import away, is_on_disk, num_bytes
from megatrain_ray.engine.plan.activation_staging import MOST_BUFFERS
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.residency import group_of
from megatrain_ray.engine.plan.schedule import Phase, Visit
from megatrain_ray.engine.plan.spill_layout import BLOCK_BYTES
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.layer_costs import LayerPrices
from megatrain_ray.engine.planner.cost.simulate_step import operations
from megatrain_ray.engine.planner.memory.spill_bytes import room_in_slots

BUFFERS_BYTES = MOST_BUFFERS * BLOCK_BYTES  # the most bytes of a GPU's activations that are in staging buffers


class Bounds:
    """Computes lower bounds for a step of one plan, in seconds."""

    def __init__(self, plan: Plan, basis: CostBasis, activations: ActivationBytes) -> None:
        """Price the visits of one micro-batch.

        activations: bytes for a micro-batch of the plan.
        """
        self._plan = plan
        self._basis = basis
        self._prices = LayerPrices(plan, basis, activations)
        keeps = tuple([(layer.activations, layer.compiled, layer.activation_budget) for layer in plan.layers])
        known = basis.known_prices(plan, activations).sweeps
        if keeps not in known:
            known[keeps] = tuple(map(self._visit_s, basis.one_sweep))
        self._sweep_s = known[keeps]  # seconds of each visit of one micro-batch
        self._num_sweeps, self._at_once = plan.step.num_sweeps, plan.step.num_live_micro_batches

    @cached_property
    def compute_s(self) -> float:
        """Return the seconds of all that is computed, except updates on the device."""
        replays_s = sum(self._prices.of_layer("replay", layer) for layer in self._plan.replayed_layers)
        return self._plan.step.num_micro_batches * (sum(self._sweep_s) + replays_s)

    @property
    def forward_bytes(self) -> float:
        """Return the bytes that the link moves in one direction during the forward of a sweep, without the head."""
        of_forward = (s for v, s in zip(self._basis.one_sweep, self._sweep_s, strict=True) if v.phase is Phase.FORWARD)
        return self._at_once * sum(of_forward) * self._basis.profile.busy_d2h_bytes_per_s

    @property
    def late_s(self) -> float:
        """Return the seconds that forwards wait for activations to leave: all but the last must have left in time."""
        on_host = [sum(num_bytes(x, k) for k in away(x) if not is_on_disk(x, k)) for x in self._plan.layers]
        late_bytes = self._at_once * sum(on_host) - max(on_host) - self.forward_bytes
        return self._num_sweeps * max(0.0, late_bytes) / self._basis.profile.busy_d2h_bytes_per_s

    @property
    def update_s(self) -> float:
        """Return the seconds of the updates of the shards."""
        return sum(map(self._prices.of_update, self._prices.updated_by_cpu))

    @property
    def disk_s(self) -> float:
        """Return the seconds of what is read and written on disk, without reads of working copies for uploads.

        State that spills is read and written once, with working copies, and so are gradients that wait there.
        Activations are written and read in every sweep.
        """
        spilled, stored = self._plan.spilled_layers, self._plan.gradients_on_disk
        activations_s = self._num_sweeps * self._activations_s
        return 2 * (sum(map(self._state_s, spilled)) + sum(map(self._gradient_s, stored)) + activations_s)

    @property
    def _activations_s(self) -> float:
        """Return the seconds of writing, or reading, the activations that all GPUs of a host have on disk."""
        return self._plan.hosts.gpus_per_host * sum(self._plan.disk_activations) / self._basis.activations_per_s

    def _swept_s(self, activations_s: float) -> float:
        """Return the seconds that are left of a step when all disk transfers for the shards are done.

        The disk does those first. The rest is either all that is computed from the head on; or activations are written
        before the first backward, and read during the backward.

        activations_s: seconds of writing, or reading, the activations of a sweep.
        """
        seconds = dict.fromkeys(Phase, 0.0)
        for visit, visit_s in zip(self._basis.one_sweep, self._sweep_s, strict=True):
            seconds[visit.phase] += self._at_once * visit_s
        in_buffers = self._plan.hosts.gpus_per_host * BUFFERS_BYTES
        moved_s = max(0.0, activations_s - in_buffers / self._basis.activations_per_s)
        others_s = self.compute_s * (1 - 1 / self._num_sweeps)
        swept_s = moved_s + max(seconds[Phase.BACKWARD], moved_s) + others_s if moved_s else 0.0
        return max(swept_s, self.compute_s - seconds[Phase.FORWARD])

    def _state_s(self, layer: int) -> float:
        """Return the seconds of reading, or writing, a layer's state, and its working copy if that is on disk."""
        precision = self._plan.precision
        item_bytes = precision.element_bytes if layer in self._plan.weights_on_disk else precision.state_bytes
        return self._disk_s(layer, item_bytes)

    def _gradient_s(self, layer: int) -> float:
        return self._disk_s(layer, self._plan.gradients.offload_dtype.itemsize)

    def _disk_s(self, layer: int, item_bytes: int) -> float:
        return self._basis.layout.host_trained_sizes[layer] * item_bytes / self._basis.disk_bytes_per_s

    def _in_memory_s(self) -> dict[int, float]:
        """Return, for each layer with data on disk, how long after the backward all of it can be in memory.

        By then all that it and the layers before it have on disk is read, and the state of all of them is written,
        except for what slots held at first and hold at last.
        """
        spilled, stored, in_memory_s = self._plan.spilled_layers, frozenset(self._plan.gradients_on_disk), {}
        moved_s = -2 * room_in_slots(self._plan, self._basis.layout) / self._basis.disk_bytes_per_s
        for layer in self._plan.layer_order if self._plan.uses_disk else ():
            moved_s += 2 * self._state_s(layer) if layer in spilled else 0.0
            moved_s += self._gradient_s(layer) if layer in stored else 0.0
            if layer in spilled or layer in stored:
                in_memory_s[layer] = moved_s
        return in_memory_s

    def _visit_s(self, visit: Visit) -> float:
        names = operations(visit.phase, self._plan.layers[visit.layer].activations)
        return sum([self._prices.of_layer(name, visit.layer) for name in names])

    @property
    def chained_s(self) -> float:
        """Return the seconds of the longest chain of updates, or disk transfers, and compute that waits for them.

        It is 0 if updates run during the backward. Else a chain is the updates up to a layer, or the disk's work before
        its update, and then all that is computed from the layer's forward on. Another chain is all the disk's work for
        updates and then for activations. The time between the end of a backward and the end of its step passes in every
        step.
        """
        if self._plan.step.update_order is UpdateOrder.BACKWARD:
            return 0.0
        left_s, updated_s, longest_s = self.compute_s, 0.0, 0.0
        updated, on_disk = set(self._prices.updated_by_cpu), self._in_memory_s()
        for visit, seconds in zip(self._basis.one_sweep, self._sweep_s, strict=True):
            if visit.phase is Phase.BACKWARD:
                break
            if visit.layer in updated:
                updated_s += self._prices.of_update(visit.layer)
                longest_s = max(longest_s, updated_s + left_s)
            if visit.layer in on_disk:
                longest_s = max(longest_s, on_disk[visit.layer] + left_s)
            left_s -= self._at_once * seconds
        if activations_s := self._activations_s:
            longest_s = max(longest_s, max([0.0, *on_disk.values()]) + self._swept_s(activations_s))
        return longest_s

    @cached_property
    def h2d_s(self) -> float:
        """Return the seconds of uploads.

        Blocks are uploaded for each forward and each backward, except for what slots hold from one to the next. Partial
        sums on the host are reloaded for every micro-batch after the first. Activations that wait elsewhere are
        reloaded.
        """
        plan, layers = self._plan, self._basis.layout.layers
        item, structure = plan.precision.working_dtype.itemsize, self._basis.structure
        streamed = [i for i in plan.host_layers if structure.layers[i].kind is LayerKind.BLOCK]
        sweep_bytes = sum(layers[i].size * item * (1 if i in structure.without_backward else 2) for i in streamed)
        edge = group_of(LayerKind.HEAD, 0)
        held = 2 * sum(slot.num_bytes for slot in plan.slots.weights if slot.group != edge)
        num_bytes = self._num_sweeps * max(0, sweep_bytes - held)
        if plan.slots.gathered:
            num_bytes //= plan.hosts.num_gpus
        if plan.gradients.sums is Tier.HOST:
            summed = sum(layer.trained.size for layer in layers)
            num_bytes += (self._num_sweeps - 1) * summed * plan.gradients.accumulate_dtype.itemsize
        num_bytes += (plan.host_activation_bytes + sum(plan.disk_activations)) * self._num_sweeps
        return num_bytes / self._basis.profile.busy_h2d_bytes_per_s
