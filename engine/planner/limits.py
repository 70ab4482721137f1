"""Whether a plan fits its limits, and by how much it does not."""

from __future__ import annotations

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan


def fits(plan: Plan) -> bool:
    return missing_bytes(plan) == 0


def missing_bytes(plan: Plan) -> int:
    """Beyond all limits together; 0 where the plan fits."""
    return beyond_device(plan) + max(0, -spare_ram(plan)) + beyond_disk(plan)


def shortfall(plan: Plan) -> int:
    """How far a plan is from fitting, to compare with others: bytes beyond each limit, by how hard these are to raise.
    A guess: RAM costs some ten times what a disk does, and memory of the device comes with another device alone."""
    return 64 * beyond_device(plan) + 8 * max(0, -spare_ram(plan)) + beyond_disk(plan)


def beyond_device(plan: Plan) -> int:
    """Bytes beyond what may be in device memory."""
    limit = plan.hbm_limit_bytes
    return 0 if limit is None else max(0, plan.total_bytes(Tier.HBM) - limit)


def host_bytes(plan: Plan) -> int:
    """All that is in host memory: on a CPU what the device has, too."""
    return plan.total_bytes(Tier.HOST) + (plan.total_bytes(Tier.HBM) if plan.device == "cpu" else 0)


def spare_ram(plan: Plan) -> int:
    """Bytes of the host's limit that the plan leaves; negative where it does not fit."""
    return plan.ram_limit_bytes - host_bytes(plan)


def beyond_disk(plan: Plan) -> int:
    """Bytes beyond what may be on disk."""
    limit = plan.spill_limit_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))
