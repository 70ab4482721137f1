"""Compares a plan with the plan of the previous start of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from megatrain_ray.console.logs import say
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import MemoryLimits
from megatrain_ray.io.storage.disk_io import DiskIo
from megatrain_ray.units import format_bytes

log = logging.getLogger(__name__)


def report_change(before: Plan | None, plan: Plan) -> None:
    """Log the plan's hash before step 1, and print what differs from the plan of the previous start, if any."""
    log.info("plan.json has the SHA-256 %s", plan.sha256)
    if before is None or before.sha256 == plan.sha256:
        return
    report = log.info if is_same_placement(before, plan) else say
    report(f"the plan is another one than that of the start before: {changes(before, plan) or 'by its rates'}")


def is_same_placement(before: Plan, now: Plan) -> bool:
    """Return whether both plans run steps in the same way, even if their limits and rates differ."""
    return _placement(before) == _placement(now)


def _placement(plan: Plan) -> Plan:
    """Return the plan without what may differ between starts although steps run in the same way.

    On some machines the kernel reports another amount of RAM every time, so limits and space for copies are left out
    too.
    """
    return replace(
        plan,
        memory_items=(),
        prediction=None,
        disk=replace(plan.disk, io=DiskIo.POSIX, packed=False),
        hosts=replace(plan.hosts, gpu_homes=tuple(replace(home, address=None) for home in plan.hosts.gpu_homes)),
        saves=replace(plan.saves, copy_bytes=0, device_copy_bytes=0),
        limits=MemoryLimits(hbm_bytes=None, ram_bytes=0, spill_bytes=None),
    )


def changes(before: Plan, now: Plan) -> str:
    """Return a text with the facts that differ, each with its value before and now."""
    pairs = zip(_facts(before), _facts(now), strict=True)
    return "; ".join(f"{name} {was} → {is_now}" for (name, was), (_, is_now) in pairs if was != is_now)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "device memory", _limit(plan.limits.hbm_bytes)
    yield "host memory", _limit(plan.limits.ram_bytes)
    yield "disk", _limit(plan.limits.spill_bytes)
    yield "layers on the device", str(len(plan.hbm_layers))
    yield "layers with gradients on disk", str(len(plan.gradients_on_disk))
    yield "layers with state on disk", str(len(plan.spilled_layers))
    yield "layers with weights on disk", str(len(plan.weights_on_disk))
    yield "activations on disk", str(len(plan.disk_activations))
    yield "boundaries on the host", str(sum(layer.boundary is Tier.HOST for layer in plan.layers))
    yield "kept on the host", str(sum(layer.kept is Tier.HOST for layer in plan.layers))
    yield (
        "steps",
        f"{plan.step.num_micro_batches} × {plan.step.micro_batch_size}, {plan.step.order.value.replace('_', ' ')}",
    )
    yield "layers updated last in forward order", str(plan.step.num_updated_late)
    yield "slots", str(len(plan.slots.weights))
    yield "uploads", "parts" if plan.slots.gathered else "whole"
    yield "sums", plan.gradients.sums.value
    yield "shards", ", ".join(map(str, plan.shards.homes)) or str(plan.shards.num_shards)
    yield "GPU workers", ", ".join(str(gpu.home or "anywhere") for gpu in plan.hosts.gpu_homes) or "anywhere"
    yield "predicted", f"{plan.prediction.step_s:.3g} s a step" if plan.prediction else "nothing"


def _limit(num_bytes: int | None) -> str:
    return "no limit" if num_bytes is None else format_bytes(num_bytes)
