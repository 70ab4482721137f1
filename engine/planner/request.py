"""Defines what a plan is made for: a machine, a request, and candidates, which are ways to run a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatrain_ray.engine.device.hardware_profile import HardwareProfile, typical
from megatrain_ray.engine.device.numa_homes import Gpu, NumaNode
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.io.storage.disk_io import PLAIN, DiskWay

ANY_ROOM = 1 << 60  # bytes: stands for the size of a disk that is not on this machine


@dataclass(frozen=True)
class SpillSpace:
    """Describes the disk space that a plan may spill to, and its rates.

    limit_bytes: bytes that may be spilled.
    bytes_per_s: rate of reads and writes that run at the same time, both together.
    way: how the disk is read and written.
    plain_bytes_per_s: rate of activations if `way` packs, because these are never packed. None: it was not measured,
        and activations are as fast as the rest.
    may_be_unpacked: packing was chosen for its rate, not asked for by the user.
    """

    limit_bytes: int
    bytes_per_s: float
    way: DiskWay = PLAIN
    plain_bytes_per_s: float | None = None
    may_be_unpacked: bool = False

    @property
    def unpacked(self) -> SpillSpace:
        """Return the same disk without packing."""
        rate = self.plain_bytes_per_s or self.bytes_per_s
        return SpillSpace(self.limit_bytes, rate, DiskWay(self.way.io))


@dataclass(frozen=True)
class Machine:
    """Describes the machine that a plan may use.

    hbm_bytes: limit of device memory; None if device memory is host memory.
    profile: measured rates; None: built-in ones are used.
    card: built-in rates of the GPU; None: typical ones.
    """

    device: str
    num_cpus: int
    num_nodes: int
    ram_bytes: int
    hbm_bytes: int | None
    profile: HardwareProfile | None = None
    spill: SpillSpace | None = None  # None: nothing is spilled
    nodes: tuple[NumaNode, ...] = ()  # NUMA nodes, if there are several; empty: nothing is bound to a node
    gpus: tuple[Gpu, ...] = ()  # of each host, in torch's order
    card: HardwareProfile | None = None

    def shards(self, asked: int | None) -> int:
        """Return the number of optimizer shards.

        asked: the number that the user set; None: one for each NUMA node.
        """
        return asked or self.num_nodes

    @property
    def rates(self) -> HardwareProfile:
        return self.profile or self.card or typical(self.device)


@dataclass(frozen=True)
class ObjectiveBytes:
    """Counts what an objective takes on the device in addition to what plain cross-entropy takes.

    per_logit: of a chunk of the loss.
    per_token: of all tokens of a GPU's step, from its beginning to its end.
    """

    per_logit: int = 0
    per_token: int = 0


@dataclass(frozen=True)
class Request:
    """Holds what the user asked for, as far as it matters for placement."""

    precision: Precision
    round_gradients: bool  # train.grad_dtype is bf16
    clip: bool
    micro_batch_size: int
    num_micro_batches: int  # of each GPU
    seq_len: int
    num_shards: int | None = None
    hbm_layers: int | None = None  # number of layers that live on the device, from the first on; None: as many as fit
    num_fragments: int = 1
    saves: bool = True  # whether saves are written while training goes on
    saves_frozen: bool = True  # false: saves leave out frozen parameters, which come from where the run began
    objective: ObjectiveBytes = ObjectiveBytes()
    scores_in_step: bool = False  # the loss is made of the log-probabilities, so the head runs once more
    scores_first: bool = False  # a forward over as many rows, for log-probabilities, comes before each step
    attention: Attention = Attention.SDPA
    packed_attention: Attention = Attention.SDPA
    free_split: bool = False  # micro-batches are of one sequence, and the plan may choose fewer and larger ones
    active_experts: int | None = None  # number of experts that a token goes to; None: all
    sliding_windows: tuple[int | None, ...] = ()  # sliding window of each block, in tokens; None, or empty: no window
    compiled: bool = False  # whether layers are compiled that can be
    mlp_chunk_tokens: int = 0  # tokens that an MLP computes at a time; 0: a whole micro-batch (only make_plan chooses)
    small_logits: bool = False  # the loss is computed in smaller chunks than usual (only make_plan chooses)
    captured: bool | None = None  # a step is a CUDA graph; None: if that is faster (only make_plan chooses)
    num_gpus: int = 1  # of all hosts
    num_hosts: int = 1
    # Each GPU uploads its part of a layer and gets the rest from the other GPUs by an all-gather. With several hosts it
    # always does. None: if that is faster (only make_plan chooses).
    gathers_slots: bool | None = None

    @property
    def sums_several(self) -> bool:
        """Return whether a step's gradient is a sum over several micro-batches, on whichever GPUs they are computed."""
        return self.num_micro_batches * self.num_gpus > 1


class SpillFirst(Enum):
    """Names the orders in which data of optimizer shards is spilled.

    LEAST takes whichever of the other orders needs the fewest bytes on disk.
    """

    LEAST = "least"
    GRADIENTS = "gradients"  # of blocks from the last to the first, then of embedding and head; then state
    STATE = "state"  # of blocks from the last to the first, then of embedding and head; then gradients
    ENDS = "ends"  # gradients, then state: of embedding and head, then of blocks from the last to the first
    FRONT = "front"  # gradients, then state: of layers from the first to the last

    __hash__ = object.__hash__  # Enum's own is written in Python, and the search calls it all the time


class Candidate(NamedTuple):
    """Describes one way to run a step, before it is known whether it fits.

    The search makes and hashes many, which is fast for tuples.

    activations: policy of layers that are not compiled; compiled ones keep what `activation_budget` allows.
    """

    order: LoopOrder
    activations: ActivationPolicy
    num_block_slots: int
    num_edge_slots: int
    sums: Tier = Tier.HBM
    gradients: Tier = Tier.HOST  # where complete gradients of host layers wait for a clipped update
    num_waiting: int = 0  # first host layers, whose gradients wait on the device whatever `gradients` says
    boundaries: Tier = Tier.HBM  # where the inputs of blocks wait for the backward
    segment: int = 1  # of so many layers only the first one's input waits; the backward recomputes the other inputs
    hbm_layers: frozenset[int] = frozenset()  # layers whose working copy, state and gradient live on the device
    activation_budget: float = 1.0
    num_tail_blocks: int = 0  # last blocks of the model, which get tail_budget
    tail_budget: float = 1.0  # activation budget of these last blocks, and of those that offload
    kept: Tier = Tier.HBM  # HOST: blocks before the last ones may offload what they keep for their backward
    num_offloading: int = 0  # blocks that do, spread evenly over those before the last ones
    spills_activations: bool = False  # activations that wait on the host are spilled if it has too little room
    spill_first: SpillFirst = SpillFirst.LEAST
    num_updated_late: int = 0  # as in StepShape: without clipping, if the slab has room for all gradients
