"""Counts a plan's device memory row by row: layers that stream or live there, gradients, and activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import accumulate, groupby
from operator import add
from typing import NamedTuple

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.flat_layout import FlatLayout
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import ELSEWHERE, Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.optimizer.muon import work_bytes
from megatrain_ray.engine.plan.plan import ALLOCATOR, CONTEXT, EXCHANGE, MemoryItem, Plan
from megatrain_ray.engine.plan.plan_groups import dtype_name
from megatrain_ray.engine.planner.memory.chunk_sizes import loss_bytes
from megatrain_ray.engine.planner.memory.work_bytes import (
    backward_bytes_by_layer,
    bytes_held_during_loss,
    fp8_bytes,
    kept_bytes,
    norm_bytes,
)
from megatrain_ray.engine.planner.request import ObjectiveBytes
from megatrain_ray.units import format_bytes

EXCHANGE_BYTES = 1 << 30  # a guess: NCCL's buffers for one communicator
# What torch's allocator may hold between tensors, as a share of the memory that it is asked for again and again, and at
# most. It keeps pages of 20 MiB that are not full. The share is a guess: with room for more it held up to 1/12 of that
# memory, and 6 GB.
ALLOCATOR_SHARE = 1 / 32
ALLOCATOR_BYTES = 1 << 30


Row = tuple[int, str]  # bytes, and the formula that they come from


class ActivationRows(NamedTuple):
    """Holds the rows of activations and of computing, which do not depend on where weights, state and gradients are.

    Gradients that wait on the device may take the place of activations that were released. `held` and `beyond` say by
    layer how much of the memory that both share is taken: of all memory, or only of the pool of settled inputs
    (settle.py).

    held: bytes of the layer's own activations, of all live micro-batches.
    beyond: bytes taken during the layer's backward, less the most that `rows` count; never above 0.
    """

    rows: dict[str, Row]
    held: tuple[int, ...]
    beyond: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.rows.values())


def device_memory_items(
    plan: Plan, structure: ModelStructure, layout: ModelLayout, activations: ActivationBytes, objective: ObjectiveBytes,
) -> Iterator[MemoryItem]:  # fmt: skip
    """Return all rows of a plan's device memory.

    plan: complete but for its rows.
    """
    activation_items = activation_rows(plan, structure, layout, activations, objective)
    rows = slot_rows(plan)
    rows |= _resident_rows(plan, layout)
    if plan.gradients_on_device:
        waiting = waiting_row(
            plan, layout, activation_items, plan.gradients_on_device, frozenset(plan.deferred_offload_layers)
        )
        rows["gradients in HBM"] = waiting
    rows |= activation_items.rows
    if layout.with_muon:
        rows["muon"] = muon_row(plan, layout)
    return (MemoryItem(Tier.HBM, name, num_bytes, formula) for name, (num_bytes, formula) in rows.items())


def slot_rows(plan: Plan) -> dict[str, Row]:
    """Return the rows of the slots that weights stream through, and of the regions for gradients.

    plan: may lack its layers.
    """
    slots, dtype = plan.slots, dtype_name(plan.gradients.accumulate_dtype)
    num_bytes = sum(slots.gradient_bytes) + sum(slots.rounded_bytes)
    formula = f"{len(slots.gradient_bytes)} of {dtype} + {len(slots.rounded_bytes)} leaving"
    weights = sum(s.num_bytes for s in slots.weights), f"{len(slots.weights)} regions"
    return {"slots": weights, "gradient slots": (num_bytes, formula)}


def activation_rows(
    plan: Plan, structure: ModelStructure, layout: ModelLayout, activations: ActivationBytes, objective: ObjectiveBytes,
) -> ActivationRows:  # fmt: skip
    """Return the rows of activations and of the memory that computing takes.

    plan: complete but for its rows.
    """
    live = plan.step.num_live_micro_batches
    # Without the head: its forward and backward are in one visit, so nothing has to wait.
    block_bytes = [kept_bytes(activations, i, layer) for i, layer in enumerate(plan.layers[:-1])]
    stays = [layer.boundary_bytes if layer.boundary is Tier.HBM else 0 for layer in plan.layers]
    staying = [b if layer.kept is Tier.HBM else 0 for b, layer in zip([*block_bytes, 0], plan.layers, strict=True)]
    inputs, kept = _released(plan, stays, staying)
    # Inputs that settled leave no room for work, but for gradients (settle.py).
    released = kept if plan.settles else [mine + entering for mine, entering in zip(kept, inputs, strict=True)]
    in_fp8 = fp8_bytes(plan, structure)
    backward = zip(backward_bytes_by_layer(plan, layout, activations), released, strict=True)
    loss = loss_bytes(plan, structure, layout, objective, held=bytes_held_during_loss(plan, activations))
    works = [*(b + in_fp8 - gone for b, gone in backward), max(loss, norm_bytes(plan, activations))]
    work = max(works)
    rows: dict[str, Row] = {
        "boundary activations": _boundaries(plan, structure, sum(stays)),
        "kept activations": _kept(plan, staying),
        "attention masks": (
            # While one is made, up to two other tensors of its size exist.
            (live + 2) * activations.masks,
            f"({live} micro-batches + 2 while one is made) × {format_bytes(activations.masks)}",
        ),
        "work": (
            work,
            f"one layer's backward, the last norm's or the loss: logits of {plan.compute.loss_chunk_tokens} tokens, "
            f"head gradient, tied ones{f'; {format_bytes(in_fp8)} of FP8 copies' if in_fp8 else ''}",
        ),
    }
    rows |= _data_rows(plan, activations, objective)
    rows |= _library_rows(plan, sum(num_bytes for num_bytes, _ in rows.values()), work)
    if plan.settles:
        return ActivationRows(rows, tuple([live * b for b in stays]), (*(-gone for gone in inputs), 0))
    held = tuple([live * (mine + entering) for mine, entering in zip(staying, stays, strict=True)])
    return ActivationRows(rows, held, tuple([num_bytes - work for num_bytes in works]))


def _data_rows(plan: Plan, activations: ActivationBytes, objective: ObjectiveBytes) -> dict[str, Row]:
    """Return the rows of what comes with the batch besides its tokens."""
    rows: dict[str, Row] = {}
    if activations.images:
        live = plan.step.num_live_micro_batches
        formula = f"{live} micro-batches × {format_bytes(activations.images)}, if all tokens are those of images"
        rows["images"] = live * activations.images, formula
    if objective.per_token:
        num_tokens = plan.step.num_micro_batches * plan.step.micro_batch_size * plan.step.seq_len
        formula = f"{num_tokens} tokens of a step × {objective.per_token}"
        rows["teacher's predictions"] = num_tokens * objective.per_token, formula
    return rows


def _library_rows(plan: Plan, tensor_bytes: int, work: int) -> dict[str, Row]:
    """Return the rows of memory that torch, CUDA and NCCL take besides tensors.

    tensor_bytes: bytes of tensors that are allocated again and again.
    work: the part of them that computing takes.
    """
    rows: dict[str, Row] = {}
    if plan.device == "cuda":
        between = min(ALLOCATOR_BYTES, int(ALLOCATOR_SHARE * tensor_bytes))
        rows[ALLOCATOR] = between, "pages of torch's allocator that are not full"
    context_bytes = plan.limits.context_bytes if plan.device == "cuda" else 0
    rows[CONTEXT] = context_bytes, "CUDA context and kernels of libraries"
    if plan.hosts.num_gpus > 1 and plan.device == "cuda":
        count = 2 if plan.slots.gathered else 1
        rows[EXCHANGE] = count * EXCHANGE_BYTES, "what NCCL takes, for sums and for all-gathers"
    if plan.step.captured:
        rows["beside the capture"] = work, "the work again, uncaptured: what a graph has nothing else can use"
    return rows


def _released(plan: Plan, stays: Sequence[int], staying: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return for each layer but the head the bytes of inputs, and of what was kept, released before its backward.

    stays: bytes of each layer's input, if it stays on the device, for one micro-batch.
    staying: the same for what layers keep.

    The input of the layer that follows has made way for its gradient. If inputs wait elsewhere, the head's is one of
    those that pass.
    """
    live, passes = plan.step.num_live_micro_batches, any(layer.boundary in ELSEWHERE for layer in plan.layers)
    inputs = [*stays[2:-1], 0 if passes else stays[-1], 0]
    return _suffix_sums([live * b for b in inputs]), _suffix_sums([live * b for b in staying[1:]])


def _boundaries(plan: Plan, structure: ModelStructure, staying: int) -> Row:
    """Return the row of boundary activations, which are the inputs of layers.

    staying: bytes of one micro-batch that stay on the device, of all layers.

    Inputs that wait elsewhere are on the device for one block at a time. In a forward each makes way for what the block
    makes of it, and in a backward for its gradient. Two more are there: one that is copied, and what is made in the
    forward; the work of a backward counts two itself. Where a segment or the parts of a block need their inputs to the
    end of their backwards, all of these are there beside all gradients. Inputs that are recomputed are there for one
    segment at a time, and one that is copied.
    """
    live = plan.step.num_live_micro_batches
    passing_bytes = [layer.boundary_bytes if layer.boundary in ELSEWHERE else 0 for layer in plan.layers]
    passing = max(sum(passing_bytes[i] for i in block) for block in structure.blocks)
    segment_bytes = [
        sum(layer.boundary_bytes for layer in segment)
        for replayed, segment in groupby(plan.layers, lambda layer: layer.boundary is None)
        if replayed
    ]
    if passing:
        staying -= plan.layers[-1].boundary_bytes  # the head's input, output of the last block, is one that passes
    num_bytes, formula = live * staying, f"{live} micro-batches × {format_bytes(staying)}"
    if passing:
        count = 2 * live + 1 if segment_bytes or structure.is_divided else live + 2
        num_bytes += count * passing
        formula += f" + {count} × {format_bytes(passing)} that pass"
    if segment_bytes:
        one = max(layer.boundary_bytes for layer in plan.layers if layer.boundary is None)
        num_bytes += live * max(segment_bytes) + one
        formula += f" + {live} × {format_bytes(max(segment_bytes))} of a segment + {format_bytes(one)}"
    return num_bytes, formula


def _kept(plan: Plan, staying: Sequence[int]) -> Row:
    """Return the row of activations that layers keep for their backward.

    staying: bytes of one micro-batch that stay on the device, by layer.

    Layers that offload what they keep need device memory for one micro-batch in one layer, and for another one that is
    being offloaded or reloaded. Layers after the last of these keep nothing on the device while offloads run, and have
    released it before the first reload. If what they keep is large enough, its memory serves for the other one.
    """
    live, num_passing = plan.step.num_live_micro_batches, 0
    num_bytes, formula = live * sum(staying), f"{live} micro-batches × {format_bytes(sum(staying))}"
    together_bytes = (sum(plan.layers[i].kept_bytes for i in together) for together in plan.kept_until)
    if passing := max(together_bytes):
        last = max(i for i, layer in enumerate(plan.layers) if layer.kept_bytes)
        num_passing = 1 if live * sum(staying[last + 1 :]) >= passing else 2
        num_bytes += num_passing * passing
        formula += f" + {num_passing} × {format_bytes(passing)} that pass"
    return num_bytes, formula


def muon_row(plan: Plan, layout: ModelLayout) -> Row:
    """Return the row of Muon: slots for momenta and for directions, and the work on the largest matrix."""
    matrices = [s.shape for i in layout.with_muon for s in layout.layers[i].muon_segments]
    work = max(map(work_bytes, matrices))
    slots = sum(plan.slots.momentum_bytes) + sum(plan.slots.direction_bytes)
    count = len(plan.slots.momentum_bytes)
    return slots + work, f"{count} momenta + {count} directions + {format_bytes(work)} for a matrix"


def _resident_rows(plan: Plan, layout: ModelLayout) -> dict[str, Row]:
    """Return the row of the layers that live on the device; none if there are none."""
    layers = [layout.layers[i] for i in sorted(plan.hbm_layers)]
    if not layers:
        return {}
    trained = sum(x.trained.size for x in layers)
    return {
        "layers in HBM": (
            sum(resident_bytes(plan.precision, x) for x in layers),
            f"{len(layers)} layers: working copy, and {plan.precision.state_bytes} bytes of state × {trained}",
        )
    }


def resident_bytes(precision: Precision, layer: FlatLayout) -> int:
    """Return the bytes of the working copy and the state of a layer that lives on the device."""
    return layer.size * precision.working_dtype.itemsize + layer.trained.size * precision.state_bytes


def waiting_row(
    plan: Plan, layout: ModelLayout, activations: ActivationRows, waiting: Set[int], deferred: Set[int]
) -> Row:
    """Return the row of complete gradients that wait on the device for their update.

    If gradients are allocated on demand (`Plan.gradients_allocated_on_demand`), only their bytes beyond the activations
    that are released by then count.

    plan: may lack its layers.
    waiting: layers whose gradients wait on the device.
    deferred: those of them that the shards update.
    """
    item = plan.gradients.accumulate_dtype.itemsize
    sizes = [size * item if i in waiting else 0 for i, size in enumerate(layout.trained_sizes)]
    formula = f"{item} bytes × {sum(sizes) // item}"
    if not plan.gradients_allocated_on_demand:
        return sum(sizes), formula
    # In the backward gradients take memory that activations release. In the next forward the gradients of host layers
    # leave while activations are allocated again.
    offloaded = [size if i in deferred else 0 for i, size in enumerate(sizes)]
    held_up_to = list(accumulate(activations.held))
    backward = map(add, activations.beyond, _suffix_sums(sizes))
    forward = map(add, [0, *held_up_to], [*_suffix_sums(offloaded), 0])
    most = max(0, max(backward), max(forward) - held_up_to[-1])
    return most, f"{formula}, beyond the activations that have gone by then"


def _suffix_sums(sizes: Sequence[int]) -> list[int]:
    """Return result[i] = sum(sizes[i:])."""
    return list(accumulate(reversed(sizes)))[::-1]
