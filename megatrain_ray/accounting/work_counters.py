"""Counts the work of a host's processes in shared memory, where the first GPU worker reads it for rows of metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.storage.disk_io import taken_bytes
from megatrain_ray.io.storage.measured_store import METER, BusyInterval, busy_s

# Counters of an optimizer shard: updates of all layers, seconds in which the kernel worked, bytes that its spill file
# takes, and its traffic of state and gradients. Each number has one writer, so that reading needs no lock.
SHARD = np.dtype([("updates", "i8"), ("update_s", "f8"), ("spill_bytes", "i8"), ("disk", METER)])
# Counters of a GPU worker: bytes that its file of activations takes, its traffic of working copies and activations, and
# how much of that (read and written, of each) belongs to steps: up to the end of the newest step with an even number,
# and up to the newest with an odd number.
GPU = np.dtype([("spill_bytes", "i8"), ("weights", METER), ("activations", METER), ("in_steps", "i8", (2, 2, 2))])


class WorkCounters:
    """Holds the counters of all processes of one host. They outlive a process; its replacement goes on with them."""

    def __init__(self, buffer: memoryview, num_shards: int, num_gpus: int) -> None:
        """Find the counters, by the number of a process on its host, in shared memory that is 0 at first."""
        self.shards = np.frombuffer(buffer, SHARD, num_shards)
        self.gpus = np.frombuffer(buffer, GPU, num_gpus, offset=self.shards.nbytes)

    @staticmethod
    def num_bytes(num_shards: int, num_gpus: int) -> int:
        return num_shards * SHARD.itemsize + num_gpus * GPU.itemsize


class WorkColumns:
    """Makes columns of metrics.jsonl from the counters of a host: its work since the row before."""

    def __init__(self, counters: WorkCounters, rank: int, activation_file: int | None, *, uses_disk: bool) -> None:
        """Begin to count, as the GPU worker of that rank on its host.

        activation_file: descriptor of its file of activations; None if there is none.
        """
        self._counters = counters
        self._rank = rank
        self._file = activation_file
        self._uses_disk = uses_disk
        self._own = counters.gpus[rank]
        self._own["in_steps"][:] = self._own["in_steps"].max(0)  # where a predecessor stood
        self._updates = self._now_updates()
        self._shards_moved = self._now_moved_by_shards()
        self._gpus_moved = counters.gpus["in_steps"].max(1).sum(0)
        self._newest = self._now_moved()

    def leave_out_evaluation(self) -> None:
        """Leave out what this GPU worker has moved since its last row. Call it when an evaluation has ended."""
        self._newest = self._now_moved()

    def columns(self, step: int, time: BusyInterval) -> dict[str, Any]:
        """Return the columns of the step that has just ended (docs/metrics.md). Its own update may go on."""
        now = self._now_updates()
        updates, seconds = now - self._updates
        done = updates > 0
        self._updates = np.where(done, now, self._updates)
        return {
            **({"update_s": float((seconds[done] / updates[done]).max())} if done.any() else {}),
            **(self._disk(step, time) if self._uses_disk else {}),
        }

    def _disk(self, step: int, time: BusyInterval) -> dict[str, Any]:
        if self._file is not None:
            self._own["spill_bytes"] = taken_bytes(self._file)
        before, self._newest = self._newest, self._now_moved()
        self._own["in_steps"][step % 2] = self._own["in_steps"].max(0) + self._newest - before
        # Other GPU workers may be in this step still, or already in the next one. All have ended the step before.
        in_steps = self._counters.gpus["in_steps"][:, (step - 1) % 2].copy()
        in_steps[self._rank] = self._own["in_steps"][step % 2]
        gpus_before, self._gpus_moved = self._gpus_moved, in_steps.sum(0)
        weights, activations = (self._gpus_moved - gpus_before).tolist()
        shards_before, self._shards_moved = self._shards_moved, self._now_moved_by_shards()
        by_shards = (self._shards_moved - shards_before).tolist()
        shards, gpus = self._counters.shards, self._counters.gpus
        busy = [shards["disk"]["busy"], gpus["weights"]["busy"], gpus["activations"]["busy"]]
        return {
            "disk_bytes": {
                "shards_read": by_shards[0],
                "shards_written": by_shards[1],
                "weights_read": weights[0],
                "activations_read": activations[0],
                "activations_written": activations[1],
            },
            "disk_s": busy_s(np.concatenate(busy), time),
            "spill_bytes": int(shards["spill_bytes"].sum() + gpus["spill_bytes"].sum()),
        }

    def _now_updates(self) -> NDArray[np.float64]:
        """Return updates and seconds of each shard, [2, shards]."""
        return np.stack([self._counters.shards["updates"], self._counters.shards["update_s"]])

    def _now_moved(self) -> NDArray[np.int64]:
        """Return bytes of weights and of activations that this GPU worker has read and written, [2, 2]."""
        return np.stack([self._own["weights"]["moved"], self._own["activations"]["moved"]])

    def _now_moved_by_shards(self) -> NDArray[np.int64]:
        moved: NDArray[np.int64] = self._counters.shards["disk"]["moved"].sum(0)
        return moved
