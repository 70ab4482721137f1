"""What a plan is made for: a machine, a request, and one of the ways to run a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatrain_ray.engine.device.hardware_profile import HardwareProfile, typical
from megatrain_ray.engine.device.numa_homes import Gpu, NumaNode
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.io.storage.disk_io import PLAIN, DiskWay

ANY_ROOM = 1 << 60  # bytes: of a disk that is not here


@dataclass(frozen=True)
class SpillSpace:
    """What may be spilled to disk: bytes, how fast they are read and written at the same time, both together, and in
    which way. Activations are never packed: where the way packs, `plain_bytes_per_s` is theirs; None: nobody measured
    it, and they are as fast as the rest. `may_be_unpacked`: packing was chosen for its rate, and not asked for.
    `direct_bytes_per_s`: of activations, where kvikio moves memory of the device and they are faster so; else None."""

    limit_bytes: int
    bytes_per_s: float
    way: DiskWay = PLAIN
    plain_bytes_per_s: float | None = None
    may_be_unpacked: bool = False
    direct_bytes_per_s: float | None = None

    @property
    def unpacked(self) -> SpillSpace:
        """The same disk without packing."""
        rate = self.plain_bytes_per_s or self.bytes_per_s
        return SpillSpace(self.limit_bytes, rate, DiskWay(self.way.io), direct_bytes_per_s=self.direct_bytes_per_s)

    @property
    def windows(self) -> Tier:
        """Where those of activations are."""
        return Tier.HBM if self.direct_bytes_per_s else Tier.HOST


@dataclass(frozen=True)
class Machine:
    """What the plan may use. `hbm_bytes`: None where the device's memory is host memory."""

    device: str
    num_cpus: int
    num_nodes: int
    ram_bytes: int
    hbm_bytes: int | None
    profile: HardwareProfile | None = None  # None: nobody measured it, built-in rates are as good as any
    spill: SpillSpace | None = None  # None: nothing is spilled
    nodes: tuple[NumaNode, ...] = ()  # NUMA nodes, where there are several; empty: nothing is put on any
    gpus: tuple[Gpu, ...] = ()  # of each host, in torch's order

    def shards(self, asked: int | None) -> int:
        """Optimizer shards; `asked`: of the user, None: one a NUMA node."""
        return asked or self.num_nodes

    @property
    def rates(self) -> HardwareProfile:
        return self.profile or typical(self.device)


@dataclass(frozen=True)
class Request:
    """What the user asked for, as far as placement goes."""

    precision: Precision
    round_gradients: bool  # train.grad_dtype: bf16
    clip: bool
    micro_batch_size: int
    num_micro_batches: int  # of each GPU
    seq_len: int
    num_shards: int | None = None
    hbm_layers: int | None = None  # that live on the device, from the first on; None: as many as fit
    num_fragments: int = 1
    saves: bool = True  # while training goes on
    saves_frozen: bool = True  # false: a save leaves out what is frozen, which comes from where the run began
    z_loss: bool = False
    attention: Attention = Attention.SDPA
    packed_attention: Attention = Attention.SDPA
    free_split: bool = False  # the plan may choose larger micro-batches, and fewer, than these of one sequence
    active_experts: int | None = None  # that a token goes to; None: all
    windows: tuple[int | None, ...] = ()  # tokens that a token of each block attends to; empty: all before it
    compiled: bool = False  # layers that can be are compiled
    mlp_chunk_tokens: int = 0  # that an MLP computes at a time; 0: a whole micro-batch (make_plan alone chooses)
    captured: bool | None = None  # a step is a graph of the device; None: where that is faster (make_plan alone)
    num_gpus: int = 1  # of all hosts
    num_hosts: int = 1
    # Each GPU uploads its part of a layer, and has the rest from the others, as it must where these are on other hosts.
    # None: where that is faster (make_plan alone).
    gathers_slots: bool | None = None

    @property
    def sums_several(self) -> bool:
        """Whether a step's gradient is a sum over micro-batches, wherever these are computed."""
        return self.num_micro_batches * self.num_gpus > 1


class SpillFirst(Enum):
    """What goes to the disk before the rest, of what optimizer shards have there. LEAST: as whichever of the others
    needs the least there."""

    LEAST = "least"
    GRADIENTS = "gradients"  # of blocks from the last on, then of the ends; then state
    STATE = "state"  # of blocks from the last on, then of the ends; then gradients
    ENDS = "ends"  # gradients, then state: of the ends, then of blocks from the last on
    FRONT = "front"  # gradients, then state, of layers from the first on

    __hash__ = object.__hash__  # Enum's own is Python, and the search asks for it all the time


@dataclass(frozen=True)
class Candidate:
    """One way to run a step, before anybody knows whether it fits. `activations`: of layers that are not compiled;
    compiled ones keep what `activation_budget` says."""

    order: LoopOrder
    activations: ActivationPolicy
    num_block_slots: int
    num_edge_slots: int
    sums: Tier = Tier.HBM
    gradients: Tier = Tier.HOST  # where complete gradients of layers on the host wait for a clipped update
    num_waiting: int = 0  # layers on the host, from the first on, whose gradients wait on the device all the same
    boundaries: Tier = Tier.HBM  # where what enters blocks waits for their backward
    segment: int = 1  # of so many layers only what enters the first waits; a backward computes the rest again
    hbm_layers: frozenset[int] = frozenset()  # whose working copies, state and gradients live on the device
    activation_budget: float = 1.0
    num_late: int = 0  # blocks of the forward's end
    late_budget: float = 1.0  # theirs
    kept: Tier = Tier.HBM  # where what they keep waits for their backward
    num_staying: int = 0  # of these the last ones keep it on the device all the same
    spills_activations: bool = False  # what waits on the host goes to the disk where the host has too little room
    spill_first: SpillFirst = SpillFirst.LEAST
