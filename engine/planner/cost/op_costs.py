"""Prices every operation of a plan in seconds, from a machine's rates. Pure."""

from __future__ import annotations

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import PART_ELEMENTS
from megatrain_ray.engine.plan.activation_moves import Activations
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.prediction import WEIGHTS_SHARE
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.layer_costs import LayerPrices
from megatrain_ray.virtual_clock import SUM_OVER_GPUS, Op, Stage

# A guess for GPUs whose link was not measured. Between two H100, over NVLink, an all-gather of 466 MB ran at 260 GB/s
# and a reduce-scatter of 932 MB at 270, where copies of 64 MiB had 342 (gpu_links in benchmarks/README.md).
GPU_LINK_BYTES_PER_S = 265e9
EXCHANGED = 0.76  # NCCL's rate as a share of the rate of copies
CPU_LINK_BYTES_PER_S = 1e9  # a guess: gloo over the loopback
HOST_LINK_BYTES_PER_S = 25e9  # a guess: 200 Gb/s between hosts, in each direction
ACTIVATIONS = frozenset(kind.value for kind in Activations)  # names of operations that move activations


class Prices:
    """Prices each operation of one plan in seconds: a CostModel of megatrain_ray/virtual_clock.py.

    layers: prices what is computed.
    """

    def __init__(self, plan: Plan, basis: CostBasis, activations: ActivationBytes) -> None:
        """Price the operations of `plan`.

        activations: bytes for a micro-batch of the plan.
        """
        self._plan = plan
        self._basis = basis
        self._profile = basis.profile
        self.layers = LayerPrices(plan, basis, activations)

    def __call__(self, stage: Stage, op: Op) -> float:
        if stage in (Stage.H2D, Stage.D2H):
            # The rate with both directions busy: in a backward the other one is, and in a forward the optimizer is.
            profile = self._profile
            rate = profile.busy_h2d_bytes_per_s if stage is Stage.H2D else profile.busy_d2h_bytes_per_s
            return profile.copy_s + op.num_bytes / rate
        if stage is Stage.ALL_GATHER or op.name == SUM_OVER_GPUS:
            return self._exchange_s(op)
        if stage is Stage.DISK:
            return self._disk_s(op)
        if stage is Stage.WEIGHTS:
            return op.num_bytes / (WEIGHTS_SHARE * self._basis.disk_bytes_per_s)
        if stage is Stage.OPTIMIZER:
            return self.layers.of_update(op.layer)
        return self.layers.of_layer(op.name, op.layer)

    def _disk_s(self, op: Op) -> float:
        """Return the seconds of a disk operation.

        With activations every GPU of the host moves as many bytes at the same time.
        """
        if op.name in ACTIVATIONS:
            return self._plan.hosts.gpus_per_host * op.num_bytes / self._basis.activations_per_s
        return op.num_bytes / self._basis.disk_bytes_per_s

    def _exchange_s(self, op: Op) -> float:
        """Return the seconds of a sum over GPUs or of an all-gather.

        Each GPU sends what it has of the others' parts, or receives what it lacks. It does both if all GPUs get the
        whole sum, or if the parts are not equally large (RankGroup.sum_part).
        """
        is_even = self._basis.layout.layers[op.layer].trained.size % (PART_ELEMENTS * self._plan.hosts.num_gpus) == 0
        times = 2 if op.name == SUM_OVER_GPUS and (self._plan.sums_whole(op.layer) or not is_even) else 1
        guess = GPU_LINK_BYTES_PER_S if self._plan.device == "cuda" else CPU_LINK_BYTES_PER_S
        copied = self._profile.gpu_link_bytes_per_s
        rate = EXCHANGED * copied if copied else guess
        if self._plan.hosts.num_hosts > 1:  # in a ring of all GPUs these bytes enter each host and leave it
            rate = min(rate, self._profile.host_link_bytes_per_s or HOST_LINK_BYTES_PER_S)
        return times * (1 - 1 / self._plan.hosts.num_gpus) * op.num_bytes / rate
