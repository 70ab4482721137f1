"""Runs the demo: train, stop, resume, export and generate, through the commands a user would type.

`make demo` runs it, from the root of the repository.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatrain_ray.io.files.owned_folder import (
    MARK_NAME,
    SHARED,
    FolderKind,
    OwnedFolder,
    is_free,
    remove_owned,
    why_not_owned,
)
from megatrain_ray.run.run_lock import lock_holder

CONFIG = "examples/tiny_llama.yaml"
FOLDER = Path("runs/demo")
RUN = FOLDER / "run"
EXPORT = FOLDER / "exported"
TRAIN = (CONFIG, f"run_dir={RUN}")
STOP_AFTER = 60  # steps; then the demo sends a Ctrl-C
STATED_LOSS = 2.0  # the mean of the last ten steps must be below; 1.96 where it was measured
GENERATE = ("ROMEO:", "--temperature", "0.8", "--max-new-tokens", "200", "--seed", "0")


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def megatrain(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatrain_ray", *arguments]


def rows() -> list[dict[str, float]]:
    path = RUN / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def begin_anew() -> None:
    """Make the folder of the demo, after deleting that of an earlier one. Nothing else is ever deleted."""
    if not is_free(FOLDER):
        if holder := lock_holder(RUN):
            sys.exit(f"{RUN} is in use by process {holder}: end it, then start again")
        if reason := why_not_owned(FOLDER, FolderKind.SCRATCH):
            sys.exit(f"{reason}; move {FOLDER} away, then start again")
        if others := {path.name for path in FOLDER.iterdir()} - {MARK_NAME, RUN.name, EXPORT.name}:
            sys.exit(f"{FOLDER} holds {', '.join(sorted(others))}, which is not the demo's: move that away")
        print(f"deleting {FOLDER}, which an earlier demo made")
        remove_owned(FOLDER, FolderKind.SCRATCH)
    FOLDER.parent.mkdir(exist_ok=True)
    OwnedFolder.make(FOLDER, FolderKind.SCRATCH, mode=SHARED).release()


def train_and_stop() -> None:
    """Start training and send it a Ctrl-C after some steps: it saves and exits 130."""
    process = subprocess.Popen(megatrain("train", *TRAIN))
    try:
        while process.poll() is None and len(rows()) < STOP_AFTER:
            time.sleep(0.2)
    except KeyboardInterrupt:  # from the user: the run gets it as well, and saves
        sys.exit(process.wait())
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
    code = process.wait()
    if code != 130:
        sys.exit(f"expected exit code 130 after an interrupt, got {code}")


def run(*arguments: str) -> None:
    """Run one command to its end. It gets a Ctrl-C as well, and may have something to save."""
    process = subprocess.Popen(megatrain(*arguments))
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()
    if code:
        sys.exit(code)


def main() -> None:
    start = time.monotonic()
    begin_anew()
    say(f"1. What will happen: megatrain plan {CONFIG}")
    run("plan", CONFIG)
    say(f"2. Train: megatrain train {' '.join(TRAIN)} (stopped by Ctrl-C after {STOP_AFTER} steps, on purpose)")
    train_and_stop()
    say(f"3. Resume: the same command, megatrain train {' '.join(TRAIN)}")
    run("train", *TRAIN)
    say(f"4. Export: megatrain export {RUN} {EXPORT}")
    run("export", str(RUN), str(EXPORT))
    say(f"5. Generate: megatrain generate {EXPORT} {' '.join(GENERATE)}")
    run("generate", str(EXPORT), *GENERATE)
    losses = [row["loss"] for row in rows()]
    final = sum(losses[-10:]) / 10
    say(f"loss {losses[0]:.2f} -> {final:.2f} in {len(losses)} steps, {time.monotonic() - start:.0f} s in all")
    if final > STATED_LOSS:
        sys.exit(f"the loss should be below {STATED_LOSS}")
    say("Next:")
    print(f"  .venv/bin/megatrain inspect {RUN}")
    print("  .venv/bin/megatrain plan YOUR.yaml              # will my model fit?")
    print("  .venv/bin/megatrain train YOUR.yaml train.lr=3e-4 data.path=YOUR.txt")


if __name__ == "__main__":
    main()
