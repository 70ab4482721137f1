"""Describes a plan in words: the table of `megatrain plan`, and the message when nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatrain_ray.engine.device.numa_homes import Home, slab_nodes
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES
from megatrain_ray.engine.layout.precision import EMULATED, FP8_COMPUTE, NARROW_MOMENTS
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy, MemoryItem, Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder, dtype_name
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.planner.limits import beyond_device, beyond_disk, host_bytes, spare_ram
from megatrain_ray.engine.planner.request import ANY_ROOM
from megatrain_ray.escapes import escaped
from megatrain_ray.io.storage.disk_io import PLAIN, DiskWay
from megatrain_ray.units import format_bytes, format_count, format_quantity, format_ranges, format_seconds

NUM_NAMED = 4  # a list of more layers than this is shortened


def describe(plan: Plan) -> str:
    """Return a text that describes a plan: its bytes per tier, then how a step runs."""
    step, gradients = plan.step, plan.gradients
    lines = [
        f"{format_count(plan.num_parameters)} parameters in {len(plan.layers)} layers, {plan.number_formats}, "
        f"{plan.device}",
        *_frozen_lines(plan),
        *_tier_lines(plan),
        "",
        f"step      {format_quantity(step.num_micro_batches, 'micro-batch')} of {step.micro_batch_size} × "
        f"{step.seq_len} tokens, {step.order.value.replace('_', ' ')}{_gpus(plan)}",
        f"weights   stream from {_where_weights_are(plan)}, {plan.slots.num_uploads} uploads a step through "
        f"{len(plan.slots.weights)} slots{_gathered(plan)}",
        _keeping(plan),
        *_compiled_lines(plan),
        *_chunk_lines(plan),
        *_part_lines(plan),
        *_waiting_lines(plan),
        *_capture_lines(plan),
        f"attention {_attention(plan)}",
        f"loss      in chunks of {plan.compute.loss_chunk_tokens} tokens",
        f"gradients leave as {dtype_name(gradients.offload_dtype)}, summed as {dtype_name(gradients.accumulate_dtype)}",
        *_spill_lines(plan),
        f"update    {_optimizers(plan)} in {_update_order(plan)}, {plan.shards.num_shards} × {plan.shards.num_threads} "
        "threads",
        *_home_lines(plan),
        *_muon_lines(plan),
        *less_precise(plan),
        f"save      {format_bytes(plan.save_bytes)}{_copies(plan)}{_left_out(plan)}",
        f"recover   {plan.shards.recovery.value} when an optimizer shard dies, "
        f"{'by the same step again' if plan.repeats_steps else 'from the last save'} when the GPU worker does",
        *(_predicted(plan, plan.prediction) if plan.prediction else ()),
    ]
    return "\n".join(map(escaped, lines))


def less_precise(plan: Plan) -> Iterator[str]:
    """Yield a line for each part of the compute that is less precise than in plain PyTorch."""
    if plan.compute.fp8:
        yield f"compute   {FP8_COMPUTE}{EMULATED if plan.device == 'cpu' else ''}"
    if plan.precision.moments == "bf16":
        yield f"moments   {NARROW_MOMENTS}"


def _gpus(plan: Plan) -> str:
    if plan.hosts.num_gpus == 1:
        return ""
    hosts = f" of {plan.hosts.num_hosts} hosts" if plan.hosts.num_hosts > 1 else ""
    return f", on each of {plan.hosts.num_gpus} GPUs{hosts}, each of which offloads its part of sums"


def _gathered(plan: Plan) -> str:
    return ", a part by each GPU, the rest from the others" if plan.slots.gathered else ""


def _home_lines(plan: Plan) -> list[str]:
    """Return the lines about NUMA nodes; none if the machine has one node."""
    if not plan.shards.homes:
        return []
    line = f"shards    {plan.shards.num_shards}: {', '.join(map(str, plan.shards.homes))}"
    by_home: dict[Home | None, list[int]] = {}
    for number, gpu in enumerate(plan.hosts.gpu_homes):
        by_home.setdefault(gpu.home, []).append(number)
    if len(by_home) < 2:
        workers = "GPU worker" if plan.hosts.gpus_per_host == 1 else "GPU workers"
        return [line + "".join(f"; {workers} and gradients that wait: {home}" for home in by_home)]
    gpus = (f"{format_ranges(numbers)} on {home or 'any node'}" for home, numbers in by_home.items())
    nodes = f"in turn on nodes {format_ranges(slab_nodes(plan.hosts.gpu_homes, plan.hosts.gpus_per_host, None))}"
    gradients = "with their GPU" if plan.hosts.gpus_per_host == 1 else nodes
    return [line, f"GPUs      worker of {', '.join(gpus)}; gradients that wait: {gradients}"]


def _where_weights_are(plan: Plan) -> str:
    count = len(plan.weights_on_disk)
    return f"the host, those of {count} layers from disk" if count else "the host"


def _keeping(plan: Plan) -> str:
    """Return the line that says how many layers keep their activations and how many recompute them.

    Compiled layers with an activation budget below 1 keep a part; `_compiled_lines` lists their budgets.
    """
    recomputed = sum(layer.activations is ActivationPolicy.RECOMPUTE for layer in plan.layers)
    partly = sum(layer.compiled and layer.activation_budget < 1 for layer in plan.layers)
    part = f"; part of those of {partly}" if partly else ""
    return (
        f"keep      activations of {len(plan.layers) - recomputed - partly} layers{part}; recompute those of "
        f"{recomputed}"
    )


def _predicted(plan: Plan, prediction: Prediction) -> Iterator[str]:
    total_s = prediction.step_s
    waits = ", ".join(
        f"{cause.replace('_', ' ')} {waited_s / total_s:.0%}"
        for cause, waited_s in sorted(prediction.exposed_s.items(), key=lambda item: -item[1])
        if waited_s > total_s / 200
    )
    moved = f"{format_bytes(prediction.h2d_bytes)} up, {format_bytes(prediction.d2h_bytes)} down"
    yield (
        f"predicted {format_seconds(total_s)} s a step, {prediction.model_tflops:.3g} model TFLOPS, bound by "
        f"{prediction.bottleneck}; waits: {waits or 'none'}; {moved}"
    )
    source = "rates of" if prediction.is_measured else "built-in rates, as nobody measured this machine:"
    yield f"          {source} {prediction.rates}"
    waited_s = prediction.exposed_s.get("optimizer", 0.0)
    if waited_s > total_s / 20 and not plan.uses_disk:
        # Updates run beside a forward if they wait for the norm of all gradients, else beside a backward.
        clipped, forward_s = plan.step.update_order is UpdateOrder.FORWARD, prediction.compute_s["forward"]
        computed_s = sum(prediction.compute_s.values())
        beside_s = forward_s if clipped else computed_s - forward_s
        updates_s = waited_s + (computed_s if plan.step.num_updated_late else beside_s)
        tokens = plan.batch_size * plan.step.seq_len * updates_s / beside_s
        yield (
            f"          updates would hide behind the {'forward' if clipped else 'backward'} from about "
            f"{format_count(float(f'{tokens:.2g}'))} tokens a step on"
        )


def _waiting_lines(plan: Plan) -> list[str]:
    on_host = sum(layer.boundary is Tier.HOST for layer in plan.layers)
    lines = [f"boundary  activations of {on_host} layers wait on the host for their backward"] if on_host else []
    if replayed := len(plan.replayed_layers):
        lines.append(f"boundary  activations of {replayed} layers are computed again for their backward")
    if offloaded := sum(layer.kept is Tier.HOST for layer in plan.layers):
        num_bytes = format_bytes(plan.host_kept_bytes)
        lines.append(f"offload   what {offloaded} layers keep waits on the host for their backward, {num_bytes}")
    return lines


def _part_lines(plan: Plan) -> list[str]:
    if plan.compute.block_parts == 1:
        return []
    experts = f", experts into {plan.compute.expert_groups} groups" if plan.compute.expert_groups > 1 else ""
    return [f"parts     blocks are divided into {plan.compute.block_parts} layers each{experts}"]


def _chunk_lines(plan: Plan) -> list[str]:
    if not plan.compute.mlp_chunk_tokens:
        return []
    return [
        f"chunks    MLPs compute {plan.compute.mlp_chunk_tokens} tokens at a time, {plan.num_mlp_chunks} chunks, and "
        "again in the backward"
    ]


def _capture_lines(plan: Plan) -> list[str]:
    return (
        ["launches  one for a step's forward and backward: they are a captured CUDA graph"]
        if plan.step.captured
        else []
    )


def _compiled_lines(plan: Plan) -> list[str]:
    """Return the line about compiled layers and their activation budgets; none if no layer is compiled."""
    budgets = [layer.activation_budget for layer in plan.layers if layer.compiled]
    counts = ", ".join(f"{budgets.count(budget)} at {budget:g}" for budget in dict.fromkeys(budgets))
    return [f"compile   {len(budgets)} layers; activation budgets: {counts}"] if budgets else []


def _frozen_lines(plan: Plan) -> list[str]:
    """Return the line about frozen layers; none if every parameter is trained."""
    if plan.num_trained == plan.num_parameters:
        return []
    partly = [layer.name for layer in plan.layers if 0 < layer.num_trained < layer.num_parameters]
    wholly = [layer.name for layer in plan.layers if not layer.num_trained and layer.num_parameters]
    return [
        f"{format_count(plan.num_trained)} of them trained; frozen wholly: {_named(wholly)}; partly: {_named(partly)}"
    ]


def _named(names: Sequence[str]) -> str:
    """Return the names, joined by commas; of more than NUM_NAMED only their number, the first and the last."""
    if len(names) > NUM_NAMED:
        return f"{len(names)} layers, {names[0]} to {names[-1]}"
    return ", ".join(names) or "none"


def _tier_lines(plan: Plan) -> list[str]:
    lines: list[str] = []
    for tier in dict.fromkeys(row.tier for row in plan.memory_items):
        rows = [row for row in plan.memory_items if row.tier is tier]
        if tier is Tier.HOST and plan.device == "cpu":
            rows.append(MemoryItem(tier, "device memory", plan.total_bytes(Tier.HBM), "the rows above"))
        lines += ["", f"{tier.value:<10}{format_bytes(sum(r.num_bytes for r in rows)):>12}   {_limit(plan, tier)}"]
        lines += [f"  {r.name:<22}{format_bytes(r.num_bytes):>12}   {r.formula}" for r in rows]
    return lines


def _optimizers(plan: Plan) -> str:
    if not plan.num_muon:
        return "AdamW"
    rest = plan.num_trained - plan.num_muon
    return f"Muon of {format_count(plan.num_muon)} and AdamW of {format_count(rest)} parameters"


def _spill_lines(plan: Plan) -> list[str]:
    """Return the line about what is on disk; none if nothing spills."""
    counts = {
        "gradients": len(plan.gradients_on_disk),
        "state": len(plan.spilled_layers),
        "weights": len(plan.weights_on_disk),
        "boundary activations": sum(layer.boundary is Tier.NVME for layer in plan.layers),
        "kept activations": sum(layer.kept is Tier.NVME for layer in plan.layers),
    }
    found = [f"{name} of {count} layers" for name, count in counts.items() if count]
    if not found:
        return []
    what = f"{', '.join(found[:-1])} and {found[-1]}" if found[1:] else found[0]
    read = format_bytes(plan.written_bytes + plan.disk.weight_read_bytes)
    way = DiskWay(plan.disk.io, plan.disk.packed and plan.uses_disk)  # activations are never packed
    by = "" if way == PLAIN else f" by {way}"
    return [f"spill     on disk: {what}; {read} read and {format_bytes(plan.written_bytes)} written a step{by}"]


def _update_order(plan: Plan) -> str:
    late = plan.step.num_updated_late
    return f"{plan.step.update_order.value} order{f', the first {late} layers last, in forward order' if late else ''}"


def _muon_lines(plan: Plan) -> list[str]:
    """Return the line about the bytes that move for Muon's directions in a step; none without Muon."""
    if not plan.num_muon:
        return []
    clipped = plan.step.update_order is UpdateOrder.FORWARD
    up = plan.num_muon * (torch.float32.itemsize + (plan.gradients.offload_dtype.itemsize if clipped else 0))
    what = "momenta and gradients" if clipped else "momenta"
    when = "after the backward" if clipped else "in the backward"
    gpus = f", divided among {plan.hosts.num_gpus} GPUs" if plan.hosts.num_gpus > 1 else ""
    return [
        f"muon      directions made {when}{gpus}: {what} back to the device, {format_bytes(up)} a step; "
        f"directions to the host, {format_bytes(plan.num_muon * DIRECTION_BYTES)}"
    ]


def _attention(plan: Plan) -> str:
    if plan.compute.attention is plan.compute.packed_attention:
        return plan.compute.attention.value
    return f"{plan.compute.attention.value}, {plan.compute.packed_attention.value} where rows hold several documents"


def _left_out(plan: Plan) -> str:
    return "" if plan.saves.includes_frozen else f"; {format_bytes(plan.frozen_bytes)} that is frozen is left out"


def _copies(plan: Plan) -> str:
    if not plan.saves.copy_bytes:
        return ""
    return f" while training goes on, through up to {format_bytes(plan.saves.copy_bytes)} of copies"


def _limit(plan: Plan, tier: Tier) -> str:
    limits = {Tier.HBM: plan.limits.hbm_bytes, Tier.HOST: plan.limits.ram_bytes, Tier.NVME: plan.limits.spill_bytes}
    limit = limits[tier]
    if limit is None:
        return "(part of host memory)"
    return "(no limit set)" if limit >= ANY_ROOM else f"of {format_bytes(limit)}"


def _processes(plan: Plan) -> int:
    return sum(row.num_bytes for row in plan.memory_items if row.tier is Tier.HOST and row.name == "processes")


def explain_infeasible(plan: Plan, remedies: Sequence[str]) -> list[str]:
    """Explain, in lines, which tiers overflow in the plan that is nearest to fitting, by how much, and what would help.

    plan: the plan that is nearest to fitting.
    remedies: changes with each of which some plan fits within the same limits.
    """
    problems = []
    if beyond_device(plan):
        limit = plan.limits.hbm_bytes or 0
        problems.append(
            f"needs {format_bytes(plan.total_bytes(Tier.HBM))} of device memory, {format_bytes(limit)} available: "
            "raise hardware.hbm_limit, or lower train.micro_batch_size or data.seq_len"
        )
    if spare_ram(plan) < 0:
        problems.append(
            f"needs {format_bytes(host_bytes(plan))} of host RAM, {format_bytes(plan.limits.ram_bytes)} available: "
            f"raise hardware.ram_limit if the machine has more, or use a smaller model (processes take "
            f"{format_bytes(_processes(plan))} of it, whatever the model)"
        )
    if beyond_disk(plan):
        limit = plan.limits.spill_bytes or 0
        problems.append(
            f"needs {format_bytes(plan.total_bytes(Tier.NVME))} of disk, {format_bytes(limit)} available: raise "
            "spill.limit, or name a folder with more room as spill.path"
        )
    if remedies:
        problems.append(f"within these limits it fits with {', or with '.join(remedies)}")
    return ["; ".join(problems), *_tier_lines(plan)]
