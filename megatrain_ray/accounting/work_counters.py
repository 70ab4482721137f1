"""Counts the work of a host's processes in shared memory, where the first GPU worker reads it for rows of metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.storage.measured_store import METER, Time, busy_s
from megatrain_ray.io.storage.spill_file import taken_bytes

# Counters of an optimizer shard: updates of all layers, seconds in which the kernel worked, bytes that its spill file
# takes, and its traffic of state and gradients. Each number has one writer, so that reading needs no lock.
SHARD = np.dtype([("updates", "i8"), ("update_s", "f8"), ("spill_bytes", "i8"), ("disk", METER)])
# Counters of a GPU worker: bytes that its file of activations takes, and its traffic of working copies and activations.
GPU = np.dtype([("spill_bytes", "i8"), ("weights", METER), ("activations", METER)])


class WorkCounters:
    """Holds the counters of all processes of one host. They outlive a process, and its replacement goes on with them.

    shards, gpus: of type SHARD and GPU, by the number of the process on its host.
    """

    def __init__(self, buffer: memoryview, num_shards: int, num_gpus: int) -> None:
        """Find the counters in shared memory of at least `num_bytes` bytes, which are 0 at first."""
        self.shards = np.frombuffer(buffer, SHARD, num_shards)
        self.gpus = np.frombuffer(buffer, GPU, num_gpus, offset=self.shards.nbytes)

    @staticmethod
    def num_bytes(num_shards: int, num_gpus: int) -> int:
        return num_shards * SHARD.itemsize + num_gpus * GPU.itemsize


class WorkColumns:
    """Makes columns of metrics.jsonl from the counters of a host: its work since the row before."""

    def __init__(self, counters: WorkCounters, rank: int, activation_file: int | None, *, uses_disk: bool) -> None:
        """Begin to count.

        rank: of this GPU worker among those of its host.
        activation_file: descriptor of its file of activations; None if there is none.
        """
        self._counters = counters
        self._rank = rank
        self._file = activation_file
        self._uses_disk = uses_disk
        self._updates = self._now_updates()
        self._moved = self._now_moved()

    def leave_out_evaluation(self) -> None:
        """Leave out what GPU workers have moved since the last row. Call it when an evaluation has ended."""
        self._moved |= {kind: moved for kind, moved in self._now_moved().items() if kind != "shards"}

    def columns(self, step: Time) -> dict[str, Any]:
        """Return the columns of the step that has just ended (docs/metrics.md).

        The step has waited for the update of the step before; its own may go on.
        """
        now = self._now_updates()
        updates, seconds = now - self._updates
        done = updates > 0
        self._updates = np.where(done, now, self._updates)
        return {
            **({"update_s": float((seconds[done] / updates[done]).max())} if done.any() else {}),
            **(self._disk(step) if self._uses_disk else {}),
        }

    def _disk(self, step: Time) -> dict[str, Any]:
        if self._file is not None:
            self._counters.gpus["spill_bytes"][self._rank] = taken_bytes(self._file)
        before, self._moved = self._moved, self._now_moved()
        moved = {kind: (self._moved[kind] - before[kind]).tolist() for kind in before}
        shards, gpus = self._counters.shards, self._counters.gpus
        meters = shards["disk"], gpus["weights"], gpus["activations"]
        return {
            "disk_bytes": {
                "shards_read": moved["shards"][0],
                "shards_written": moved["shards"][1],
                "weights_read": moved["weights"][0],
                "activations_read": moved["activations"][0],
                "activations_written": moved["activations"][1],
            },
            "disk_s": busy_s(np.concatenate([meter["busy"] for meter in meters]), step),
            "spill_bytes": int(shards["spill_bytes"].sum() + gpus["spill_bytes"].sum()),
        }

    def _now_updates(self) -> NDArray[np.float64]:
        """Return updates and seconds of each shard, [2, shards]."""
        return np.stack([self._counters.shards["updates"], self._counters.shards["update_s"]])

    def _now_moved(self) -> dict[str, NDArray[np.int64]]:
        """Return bytes read and written by kind, each [2]."""
        shards, gpus = self._counters.shards, self._counters.gpus
        meters = {"shards": shards["disk"], "weights": gpus["weights"], "activations": gpus["activations"]}
        return {kind: meter["moved"].sum(0) for kind, meter in meters.items()}
