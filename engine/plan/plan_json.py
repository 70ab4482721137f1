"""Reads the text of plans of version 1, in which all settings were keys of one flat object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatrain_ray.engine.plan import plan_groups as groups
from megatrain_ray.read_file import parse_json


def _keys(group: type, **renamed: str) -> Mapping[str, str]:
    """Return each key of a group, with its key in version 1."""
    return {field.name: renamed.get(field.name, field.name) for field in fields(group)}


GROUPS: Mapping[str, Mapping[str, str]] = {
    "step": _keys(groups.StepShape),
    "compute": _keys(groups.ComputeSettings, num_threads="num_compute_threads"),
    "slots": _keys(
        groups.SlotSizes,
        weights="slots",
        gradient_bytes="gradient_slot_bytes",
        rounded_bytes="leaving_slot_bytes",
        momentum_bytes="momentum_slot_bytes",
        direction_bytes="direction_slot_bytes",
        gathered="gathers_slots",
        num_uploads="uploads_per_step",
    ),
    "gradients": _keys(groups.GradientSettings, offload_dtype="gradient_dtype", accumulate_dtype="sum_dtype"),
    "disk": _keys(
        groups.DiskSettings,
        io="disk_io",
        packed="disk_packed",
        num_state_slots="state_slots",
        num_upload_buffers="weight_windows",
        num_staging_buffers="num_windows",
        staging_buffer_bytes="window_bytes",
    ),
    "shards": _keys(
        groups.ShardSettings,
        cut_elements="shard_cut_elements",
        num_threads="num_shard_threads",
        homes="shard_homes",
    ),
    "hosts": _keys(groups.HostSettings),
    "saves": _keys(groups.SaveSettings, includes_frozen="saves_frozen", copy_bytes="save_copy_bytes"),
    "limits": _keys(
        groups.MemoryLimits,
        hbm_bytes="hbm_limit_bytes",
        ram_bytes="ram_limit_bytes",
        spill_bytes="spill_limit_bytes",
    ),
}


def as_version_2(text: str) -> str:
    """Return the text of the plan as version 2. Text that is not a plan of version 1 is returned as it is."""
    try:
        old = parse_json(text)
    except ValueError:
        return text
    if not isinstance(old, dict) or old.get("version") != 1:
        return text
    new: dict[str, Any] = {key: old[key] for key in ("device", "precision", "layers", "prediction") if key in old}
    for group, keys in GROUPS.items():
        new[group] = {now: old[before] for now, before in keys.items() if before in old}
    if old.get("num_hosts", 1) != 1:
        new["slots"]["gathered"] = True  # plans of several hosts always gathered slots, also before they had this key
    return json.dumps({"version": 2, "memory_items": old.get("rows", []), **new})
