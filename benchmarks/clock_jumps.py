"""Compares a run whose wall clock jumps by days, forwards and backwards, with the same run undisturbed.

It needs root, to set the clock.

    python -m benchmarks.clock_jumps OUT.json

Compared are losses, gradient norms, the names of the saves, and the state in the last save.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain_ray.io.saves.manifest import read_manifest
from megatrain_ray.io.saves.save_folder import read_pieces
from megatrain_ray.io.saves.save_writer import Piece
from tests.support.runs import ROOT, command, config, rows, write_config
from tests.support.tiny import build_tiny

DAY_S = 86400.0
JUMPS_S = {3: DAY_S, 10: -2 * DAY_S, 20: 0.0}  # completed steps: distance from the true time from then on
STEPS = 40


class Clock:
    """Sets the wall clock of this machine wrong by a number of seconds."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def shift(self, seconds: float) -> None:
        time.clock_settime(time.CLOCK_REALTIME, time.monotonic() + self._ahead_s + seconds)


@contextmanager
def clock() -> Iterator[Clock]:
    """Yield the wall clock, and set it right again afterwards."""
    it = Clock()
    try:
        yield it
    finally:
        it.shift(0.0)


def train(folder: Path, model: Path, clock: Clock | None) -> dict[str, Any]:
    tree = config(folder / "run", model, train__steps=STEPS, save_every=2, save_keep=3, train__precision="bf16")
    path = write_config(folder / "config.yaml", tree)
    start_s, jumps = time.monotonic(), dict(JUMPS_S if clock else {})
    process = subprocess.Popen(command("train", str(path)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and time.monotonic() - start_s < 300:
        done = len(rows(folder / "run"))
        for step in [step for step in jumps if step <= done]:
            assert clock is not None
            clock.shift(jumps.pop(step))
        time.sleep(0.02)
    _, errors = process.communicate(timeout=60)
    saves = folder / "run" / "saves"
    return {
        "exit": process.returncode,
        "jumps_left": len(jumps),
        "wall_s": round(time.monotonic() - start_s, 1),
        "rows": [(row["step"], row["loss"], row["grad_norm"]) for row in rows(folder / "run")],
        "saves": sorted(path.name for path in saves.iterdir()),
        "state": asyncio.run(state_of(saves / f"step_{STEPS}")),
        "dates": sorted({line[:10] for line in (folder / "run" / "logs" / "driver.log").read_text().splitlines()}),
        "last_words": errors.splitlines()[-1] if errors else "",
    }


async def state_of(folder: Path) -> dict[str, str]:
    """Return a digest of each kind of state of each layer.

    Layers are read by name, because blobs of two saves may hold them in different orders.
    """
    manifest = read_manifest(folder)
    digests = {}
    for layer, (kind, itemsize) in itertools.product(manifest.layers, manifest.itemsize.items()):
        state = bytearray(layer.logical_size * itemsize)
        await read_pieces(folder, manifest, [Piece(layer.name, kind, 0, layer.logical_size, [memoryview(state)])])
        digests[f"{layer.name} {kind}"] = hashlib.sha256(state).hexdigest()
    return digests


def main() -> int:
    with tempfile.TemporaryDirectory() as name, clock() as it:
        folder = Path(name)
        model = build_tiny(folder / "model")
        results = {}
        for kind, moved in (("undisturbed", None), ("jumping", it)):
            (folder / kind).mkdir()
            results[kind] = train(folder / kind, model, moved)
    same = [key for key in ("exit", "rows", "saves", "state") if results["undisturbed"][key] == results["jumping"][key]]
    Path(sys.argv[1]).write_text(json.dumps({"jumps_s": JUMPS_S, "same": same, **results}, indent=1))
    print(f"the same: {', '.join(same)}; dates seen by the driver: {results['jumping']['dates']}")
    return 0 if len(same) == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
