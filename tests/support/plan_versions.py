"""Writes a plan as earlier releases did."""

from __future__ import annotations

import json
from typing import Any

from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_json import GROUPS


def version_1(plan: Plan) -> dict[str, Any]:
    """Return the plan as version 1, with all settings as keys of one object."""
    tree = json.loads(plan.to_json())
    groups = {group: tree.pop(group) for group in GROUPS}
    flat = {before: groups[group][now] for group, keys in GROUPS.items() for now, before in keys.items()}
    return {**tree, "version": 1, "rows": tree.pop("memory_items"), **flat}
