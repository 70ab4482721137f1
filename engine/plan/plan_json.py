"""Reads the text of plans of version 1, in which all settings were keys of one flat object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# For each group of version 2: its keys, each with the key of version 1.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "step": {
        "order": "order",
        "update_order": "update_order",
        "micro_batch_size": "micro_batch_size",
        "num_micro_batches": "num_micro_batches",
        "seq_len": "seq_len",
        "captured": "captured",
    },
    "compute": {
        "attention": "attention",
        "packed_attention": "packed_attention",
        "loss_chunk_tokens": "loss_chunk_tokens",
        "compiled_loss": "compiled_loss",
        "chunks_add_to_sums": "chunks_add_to_sums",
        "num_threads": "num_compute_threads",
        "mlp_chunk_tokens": "mlp_chunk_tokens",
        "block_parts": "block_parts",
        "expert_groups": "expert_groups",
    },
    "slots": {
        "weights": "slots",
        "gradient_bytes": "gradient_slot_bytes",
        "rounded_bytes": "leaving_slot_bytes",
        "momentum_bytes": "momentum_slot_bytes",
        "direction_bytes": "direction_slot_bytes",
        "gathered": "gathers_slots",
        "num_uploads": "uploads_per_step",
    },
    "gradients": {
        "offload_dtype": "gradient_dtype",
        "accumulate_dtype": "sum_dtype",
        "sums": "sums",
        "slab_bytes": "slab_bytes",
        "direction_slab_bytes": "direction_slab_bytes",
    },
    "disk": {
        "io": "disk_io",
        "packed": "disk_packed",
        "extent_elements": "extent_elements",
        "num_state_slots": "state_slots",
        "num_upload_buffers": "weight_windows",
        "weight_read_bytes": "weight_read_bytes",
        "num_staging_buffers": "num_windows",
        "staging_buffer_bytes": "window_bytes",
    },
    "shards": {
        "num_shards": "num_shards",
        "cut_elements": "shard_cut_elements",
        "num_threads": "num_shard_threads",
        "recovery": "recovery",
        "homes": "shard_homes",
    },
    "hosts": {"num_hosts": "num_hosts", "num_gpus": "num_gpus", "gpu_homes": "gpu_homes"},
    "saves": {
        "includes_frozen": "saves_frozen",
        "copy_bytes": "save_copy_bytes",
        "device_copy_bytes": "device_copy_bytes",
    },
    "limits": {"hbm_bytes": "hbm_limit_bytes", "ram_bytes": "ram_limit_bytes", "spill_bytes": "spill_limit_bytes"},
}


def as_version_2(text: str) -> str:
    """Return the text of the plan as version 2. Text that is not a plan of version 1 is returned as it is."""
    try:
        old = json.loads(text)
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
