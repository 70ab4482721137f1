"""Counts what a plan takes in host memory and on disk, row by row."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import SECOND_MOMENT_BYTES
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.optimizer.undo_log import num_units, room_bytes
from megatrain_ray.engine.plan.activation_staging import staging_buffers_of
from megatrain_ray.engine.plan.plan import MemoryItem, Plan
from megatrain_ray.engine.planner.memory.spill_bytes import slots_bytes, spilled_bytes, upload_buffers_bytes
from megatrain_ray.io.words.atomic_words import WORD_BYTES
from megatrain_ray.units import format_bytes

# Host memory of each process for interpreter, torch and Ray; 0.45 to 0.62 GiB seen with torch 2.13 on Linux.
PROCESS_BYTES = 640 << 20
# Further host memory of a run for each GPU: CUDA and its libraries in the GPU worker, which then has 1.6 GB, and the
# compiler. With Ray's own 1.1 GB, runs with one shard on an H200 took 4.6 to 5.2 GB in all (results of 2026-11-22 in
# benchmarks/).
BESIDE_GPU_BYTES = 1280 << 20
# Processes besides the shards: driver, one GPU worker, data, arena owner.
OTHER_PROCESSES = 4
ON_THEIR_WAY = " on their way between device and disk"


def host_memory_items(plan: Plan, layout: ModelLayout) -> Iterator[MemoryItem]:
    """Return all rows of a plan's host memory.

    plan: complete but for its rows.
    """
    size = layout.size_among(plan.weights_on_host)
    working = size * plan.precision.working_dtype.itemsize
    threads = plan.shards.num_shards * plan.shards.num_threads
    units = max(sum(map(num_units, sizes)) for sizes in layout.trained_numels)
    marks = WORD_BYTES * (units + plan.shards.num_shards)
    rows: dict[str, tuple[int, str]] = {
        "working copy": (working, f"{size} padded elements"),
        "optimizer state": _state(plan, layout),
        "gradients in waiting": (plan.gradients.slab_bytes, f"slab, {plan.gradients.slab_itemsize} bytes an element"),
        "journals": (threads * room_bytes(plan.precision) + marks, f"up to {threads} threads' old contents, marks"),
        "processes": _processes(plan),
    }
    if plan.uses_disk:
        count = f"{plan.shards.num_shards} × {plan.disk.num_state_slots}"
        formula = f"{count} parts of layers on their way between disk and updates"
        rows["state slots"] = slots_bytes(plan, layout), formula
    if plan.weights_on_disk:
        formula = f"{plan.disk.num_upload_buffers} working copies of layers on their way from disk to the device"
        rows["weight windows"] = upload_buffers_bytes(plan, layout), formula
    each_gpu = _each_gpu(plan)
    if plan.host_boundary_bytes:
        rows["boundary activations"] = (
            plan.hosts.gpus_per_host * plan.host_boundary_bytes,
            f"what enters layers, until their backward{each_gpu}",
        )
    if plan.host_kept_bytes:
        rows["kept activations"] = (
            plan.hosts.gpus_per_host * plan.host_kept_bytes,
            f"what layers keep, until their backward{each_gpu}",
        )
    if plan.disk_activations:
        rows["activation windows"] = _staging_buffers(plan)
    if plan.num_muon:
        rows["directions in waiting"] = plan.gradients.direction_slab_bytes, "Muon's, bf16, of four layers at most"
    return (MemoryItem(Tier.HOST, name, num_bytes, formula) for name, (num_bytes, formula) in rows.items())


def _each_gpu(plan: Plan) -> str:
    return f", of each of {plan.hosts.gpus_per_host} GPUs" if plan.hosts.gpus_per_host > 1 else ""


def _staging_buffers(plan: Plan) -> tuple[int, str]:
    num_bytes = staging_buffers_of(plan).host_bytes(plan.disk_activations)
    formula = f"{plan.disk.num_staging_buffers} × {format_bytes(plan.disk.staging_buffer_bytes)}{ON_THEIR_WAY}"
    return plan.hosts.gpus_per_host * num_bytes, formula + _each_gpu(plan)


def _processes(plan: Plan) -> tuple[int, str]:
    count = OTHER_PROCESSES - 1 + plan.hosts.gpus_per_host + plan.shards.num_shards
    gpu_bytes = plan.hosts.gpus_per_host * BESIDE_GPU_BYTES if plan.device == "cuda" else 0
    gpus = "a GPU" if plan.hosts.gpus_per_host == 1 else f"{plan.hosts.gpus_per_host} GPUs"
    more = f" + {format_bytes(gpu_bytes)} for {gpus}" if gpu_bytes else ""
    return count * PROCESS_BYTES + gpu_bytes, f"{count} × {format_bytes(PROCESS_BYTES)}{more}"


def disk_memory_items(plan: Plan, layout: ModelLayout) -> Iterator[MemoryItem]:
    """Yield all rows of a plan's disk space.

    plan: complete but for its rows.
    """
    gradient_bytes, state_bytes, weight_bytes = spilled_bytes(plan, layout)
    if stored := plan.gradients_on_disk:
        itemsize = plan.gradients.offload_dtype.itemsize
        formula = f"{itemsize} bytes an element of {len(stored)} layers, written and read once a step"
        yield MemoryItem(Tier.NVME, "gradients in waiting", gradient_bytes, formula)
    if spilled := plan.spilled_layers:
        formula = f"{plan.precision.state_bytes} bytes of state of {len(spilled)} layers, read and written once a step"
        yield MemoryItem(Tier.NVME, "optimizer state", state_bytes, formula)
    if on_disk := plan.weights_on_disk:
        formula = f"working copies of {len(on_disk)} layers, read and written once a step, and read for every upload"
        yield MemoryItem(Tier.NVME, "weights", weight_bytes, formula)
    if plan.disk_activations:
        times = "once" if plan.step.num_sweeps == 1 else f"{plan.step.num_sweeps} times"
        of = f"of {len(plan.disk_activations)} layers and micro-batches{_each_gpu(plan)}"
        formula = f"{of}, written and read {times} a step"
        yield MemoryItem(Tier.NVME, "activations", plan.activation_disk_bytes, formula)


def _state(plan: Plan, layout: ModelLayout) -> tuple[int, str]:
    in_memory = plan.host_layers - plan.spilled_layers
    on_host = [layout.layers[i] for i in in_memory]
    per_element, size = plan.precision.state_bytes, sum(layout.shares[i].trained.size for i in in_memory)
    without_v = sum(layer.trained.size - layer.adamw.size for layer in on_host)  # only runs with one host use Muon
    less = f" - {SECOND_MOMENT_BYTES} × {without_v}" if without_v else ""
    return size * per_element - without_v * SECOND_MOMENT_BYTES, f"{per_element} bytes × {size}{less}"
