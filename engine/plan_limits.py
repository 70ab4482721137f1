"""Whether a plan fits its limits, and by how much it does not."""

from __future__ import annotations

from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.tier import Tier


def fits(plan: Plan) -> bool:
    return missing_bytes(plan) == 0


def missing_bytes(plan: Plan) -> int:
    """Beyond all limits together; 0 where the plan fits."""
    limit = plan.hbm_limit_bytes
    of_device = 0 if limit is None else max(0, plan.total_bytes(Tier.HBM) - limit)
    return of_device + max(0, -spare_ram(plan)) + beyond_disk(plan)


def spare_ram(plan: Plan) -> int:
    """Bytes of the host's limit that the plan leaves; negative where it does not fit."""
    on_host = plan.total_bytes(Tier.HOST) + (plan.total_bytes(Tier.HBM) if plan.device == "cpu" else 0)
    return plan.ram_limit_bytes - on_host


def beyond_disk(plan: Plan) -> int:
    """Bytes beyond what may be on disk."""
    limit = plan.spill_limit_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))
