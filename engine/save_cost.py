"""What a save costs a running training, predicted before it begins."""

from __future__ import annotations

from megatrain_ray.engine.plan import Plan

# One thread copying between two regions of RAM. A guess: an H200's host made 21 GB/s of triad with one.
COPY_BYTES_PER_S = 5e9


def predict_stall_s(plan: Plan, step_s: float, write_bytes_per_s: float) -> float:
    """How long a save will hold updates up, in seconds.

    From a layer's update to its next one a step passes. What the disk has not taken by then is copied into spare RAM
    by the shard's threads; updates wait for the disk only with what does not fit there.
    """
    late = max(0.0, plan.save_bytes - write_bytes_per_s * step_s)
    copied = min(late, plan.save_copy_bytes)
    copy_bytes_per_s = COPY_BYTES_PER_S * plan.num_shards * plan.num_shard_threads
    return copied / copy_bytes_per_s + (late - copied) / write_bytes_per_s
