"""Predicts, before a save begins, what it costs a running training."""

from __future__ import annotations

import math
import time

from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers


def predict_stall_s(plan: Plan, step_s: float, write_bytes_per_s: float, copy_bytes_per_s: float) -> float:
    """Return how many seconds a save will delay updates. Rates are those of all hosts together.

    One step passes between two updates of a layer. What is not written to disk by then is copied into spare RAM.
    Updates wait for the disk only for what does not fit there.
    """
    late = max(0.0, plan.updated_bytes - write_bytes_per_s * step_s)
    copied = min(late, plan.hosts.num_hosts * plan.saves.copy_bytes)
    return copied / copy_bytes_per_s + (late - copied) / write_bytes_per_s


def measure_copy(shard: AdamShard, spare: SnapshotBuffers) -> float:
    """Return the bytes per second at which a shard copies the largest layer that fits into spare RAM.

    It copies as a save does: with the shard's threads, from its arenas into pages that are already allocated. Returns
    infinity if no layer fits, because then nothing is copied.
    """
    for layer in sorted(range(len(shard.layout.spans)), key=shard.copy_bytes, reverse=True):
        room = spare.take(shard.copy_bytes(layer))
        if room is not None:
            shard.copy_layer(layer, room)  # not timed: the first write allocates the pages
            start_s = time.perf_counter()
            shard.copy_layer(layer, room)
            elapsed_s = time.perf_counter() - start_s
            spare.give_back(room)
            return shard.copy_bytes(layer) / elapsed_s
    return math.inf
