"""Writes one part of a save, in the process that holds its state, while updates go on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.engine.shards.save_gate import SaveAttempt, SaveGate
from megatrain_ray.io.saves.manifest import PartManifest
from megatrain_ray.io.saves.save_folder import write_part
from megatrain_ray.spans import SpanLog


@dataclass(frozen=True)
class WrittenPart:
    """Describes a shard's part of a save after it was written.

    stall_s: seconds for which it held up updates.
    write_s: seconds that it took.
    """

    part: PartManifest
    stall_s: float
    write_s: float


def write_gated_part(
    gate: SaveGate,
    index: int,
    save_folder: Path,
    attempt: SaveAttempt,
    compression: SaveCompression,
    spans: SpanLog,
) -> WrittenPart:
    """Write part `index` of the save of a step, each layer once it has had that step's update."""
    start_s = time.monotonic()
    save = gate.begin(attempt)
    pieces, done = gate.pieces(save), partial(gate.done, save)
    try:
        part = asyncio.run(write_part(save_folder, index, pieces, done, compression, spans))
    except BaseException:
        gate.abandon(attempt)
        raise
    return WrittenPart(part, save.stall_s, time.monotonic() - start_s)
