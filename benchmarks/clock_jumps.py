"""A wall clock that jumps by days, forwards and backwards, while a run trains and saves. Needs root, to set the clock.

    python -m benchmarks.clock_jumps OUT.json

Compared with the same run undisturbed: losses, norms, and the bytes of the last save.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.runs import ROOT, command, config, rows, write_config
from tests.tiny import build_tiny

DAY_S = 86400.0
JUMPS_S = {3: DAY_S, 10: -2 * DAY_S, 20: 0.0}  # by step: from the true time, from then on
STEPS = 40


class Clock:
    """The wall clock of this machine, which can be set wrong by so many seconds."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def shift(self, seconds: float) -> None:
        time.clock_settime(time.CLOCK_REALTIME, time.monotonic() + self._ahead_s + seconds)


@contextmanager
def clock() -> Iterator[Clock]:
    """Right again afterwards."""
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
        "blobs": {
            blob.name: hashlib.sha256(blob.read_bytes()).hexdigest()
            for blob in sorted((saves / f"step_{STEPS}").glob("part_*"))
        },
        "dates": sorted({line[:10] for line in (folder / "run" / "logs" / "driver.log").read_text().splitlines()}),
        "last_words": errors.splitlines()[-1] if errors else "",
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as name, clock() as it:
        folder = Path(name)
        model = build_tiny(folder / "model")
        results = {}
        for kind, moved in (("undisturbed", None), ("jumping", it)):
            (folder / kind).mkdir()
            results[kind] = train(folder / kind, model, moved)
    same = [key for key in ("exit", "rows", "saves", "blobs") if results["undisturbed"][key] == results["jumping"][key]]
    Path(sys.argv[1]).write_text(json.dumps({"jumps_s": JUMPS_S, "same": same, **results}, indent=1))
    print(f"the same: {', '.join(same)}; dates seen by the driver: {results['jumping']['dates']}")
    return 0 if len(same) == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
