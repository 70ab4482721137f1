"""What a save costs a running training, predicted before it begins."""

from __future__ import annotations

import time

import torch

from megatrain_ray.engine.plan import Plan

PROBE_BYTES = 256 << 20


def predict_stall_s(plan: Plan, step_s: float, write_bytes_per_s: float, copy_bytes_per_s: float) -> float:
    """How long a save will hold updates up, in seconds.

    From a layer's update to its next one a step passes. What the disk has not taken by then is copied into spare RAM;
    updates wait for the disk only with what does not fit there.
    """
    late = max(0.0, plan.save_bytes - write_bytes_per_s * step_s)
    copied = min(late, plan.save_copy_bytes)
    return copied / copy_bytes_per_s + (late - copied) / write_bytes_per_s


def measure_copy() -> float:
    """Bytes per second of copying in RAM with all of torch's threads, whose number in this process is the machine's."""
    source, to = (torch.zeros(PROBE_BYTES, dtype=torch.uint8).add_(1) for _ in range(2))
    start_s = time.perf_counter()
    to.copy_(source)
    return PROBE_BYTES / (time.perf_counter() - start_s)
