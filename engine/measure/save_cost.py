"""What a save costs a running training, predicted before it begins."""

from __future__ import annotations

import math
import time

from torch import Tensor

from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.spare_memory import SpareMemory


def predict_stall_s(plan: Plan, step_s: float, write_bytes_per_s: float, copy_bytes_per_s: float) -> float:
    """How long a save will hold updates up, in seconds. Rates: of all hosts.

    From a layer's update to its next one a step passes. What the disk has not taken by then is copied into spare RAM;
    updates wait for the disk only with what does not fit there.
    """
    late = max(0.0, plan.updated_bytes - write_bytes_per_s * step_s)
    copied = min(late, plan.num_hosts * plan.save_copy_bytes)
    return copied / copy_bytes_per_s + (late - copied) / write_bytes_per_s


def measure_copy(shard: AdamShard, spare: SpareMemory) -> float:
    """Bytes per second at which a shard copies aside the largest layer there is room for, as a save does: with its
    threads, from its arenas into pages that are there. Infinity where there is no room, and so nothing is copied."""
    for layer in sorted(range(len(shard.layout.spans)), key=shard.copy_bytes, reverse=True):
        room = spare.take(shard.copy_bytes(layer))
        if room is not None:
            return _time_copy(shard, layer, room, spare)
    return math.inf


def _time_copy(shard: AdamShard, layer: int, room: Tensor, spare: SpareMemory) -> float:
    shard.copy_layer(layer, room)  # takes its pages
    start_s = time.perf_counter()
    shard.copy_layer(layer, room)
    elapsed_s = time.perf_counter() - start_s
    spare.give_back(room)
    return shard.copy_bytes(layer) / elapsed_s
