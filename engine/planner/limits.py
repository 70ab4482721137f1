"""Checks whether a plan fits its limits, and counts the bytes by which it does not."""

from __future__ import annotations

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan


def fits(plan: Plan) -> bool:
    return missing_bytes(plan) == 0


def missing_bytes(plan: Plan) -> int:
    """Return the bytes by which a plan exceeds all its limits together; 0 if it fits."""
    return beyond_device(plan) + max(0, -spare_ram(plan)) + beyond_disk(plan)


def shortfall(plan: Plan) -> int:
    """Return a weighted sum of the bytes by which a plan exceeds each limit, to compare plans that do not fit.

    The weight says how hard a limit is to raise: 64 for device memory, 8 for host memory, 1 for disk. The weights are a
    guess: RAM costs about ten times what a disk does, and more device memory takes another device.
    """
    return 64 * beyond_device(plan) + 8 * max(0, -spare_ram(plan)) + beyond_disk(plan)


def beyond_device(plan: Plan) -> int:
    """Return the bytes by which a plan exceeds the limit of device memory; 0 if there is no limit."""
    limit = plan.limits.hbm_bytes
    return 0 if limit is None else max(0, plan.total_bytes(Tier.HBM) - limit)


def host_bytes(plan: Plan) -> int:
    """Return all bytes of host memory that a plan takes; with the CPU device these include its device memory."""
    return plan.total_bytes(Tier.HOST) + (plan.total_bytes(Tier.HBM) if plan.device == "cpu" else 0)


def spare_ram(plan: Plan) -> int:
    """Return the bytes of the host's limit that the plan leaves unused; negative if it does not fit."""
    return plan.limits.ram_bytes - host_bytes(plan)


def beyond_disk(plan: Plan) -> int:
    """Return the bytes by which a plan exceeds what it may put on disk: all of them if nothing may spill."""
    limit = plan.limits.spill_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))
