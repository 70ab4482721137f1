"""Kills `megatrain export`: the folder must appear whole or not at all, and the same command must then make it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kill_campaign import checks
from benchmarks.kill_campaign.cases import DRIVER
from benchmarks.kill_campaign.chain import END_S, STRIKE_S, Result
from benchmarks.kill_campaign.checks import OK
from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.phases import Phase, by_folder, by_stack
from benchmarks.kill_campaign.strike import Blow, strike
from tests.support.runs import command

WEIGHTS = "model.safetensors"
NUM_ATTEMPTS = 5  # tries of a phase that does not come


def export_phases(partial: Path, whole_bytes: int) -> Iterator[Phase]:
    """Yield the phases of an export into the folder `partial`.

    `whole_bytes`: bytes of the weights, without the file's header.
    """
    yield by_stack("starting", "cli.py", "main", early=True)
    yield by_folder("folder without weights", partial, lambda files: WEIGHTS not in files)
    yield by_folder("weights growing", partial, lambda files: 0 < files.get(WEIGHTS, 0) < whole_bytes)
    yield by_folder("weights whole, folder not renamed", partial, lambda files: files.get(WEIGHTS, 0) > whole_bytes)


def kill_exports(run_dir: Path, scratch: Path, expected: str, whole_bytes: int) -> Iterator[Result | str]:
    """Yield results, and a sentence for each phase that did not come.

    `expected`: the digest of an undisturbed export.
    """
    for k, phase in enumerate(export_phases(scratch / ".out.partial", whole_bytes)):
        out = scratch / "out"
        arguments = command("export", str(run_dir), str(out), "--dtype", "fp32")
        for attempt in range(NUM_ATTEMPTS):
            live = LiveRun(arguments, run_dir, scratch / f"export_{k}_{attempt}.txt")
            hit = strike(live, Blow((DRIVER,), phase), STRIKE_S)
            live.process.wait(END_S)
            if hit is not None:
                result = Result(f"export/{phase.name}", "EXPORT", "SILENT", [hit], live.process.returncode)
                yield _checked(result, arguments, out, expected)
                break
            _remove(out)
        else:
            yield f"the phase of export/{phase.name} did not come"


def _checked(result: Result, arguments: list[str], out: Path, expected: str) -> Result:
    result.checks["absent"] = OK if not out.exists() else f"{out} is there after the kill"
    start_s = time.monotonic()
    again = LiveRun(arguments, out, out.with_name("again.txt"))
    code = again.process.wait(END_S)
    result.seconds = round(time.monotonic() - start_s, 2)
    result.checks["again"] = OK if code == 0 else f"exit {code}: {again.text()}"
    result.checks["weights"] = OK if checks.folder_digest(out) == expected else "differ from the undisturbed export's"
    left = [path.name for path in out.parent.iterdir() if path.name.endswith(".partial")]
    result.checks["unfinished files"] = OK if not left else f"left: {left}"
    _remove(out)
    return result


def _remove(out: Path) -> None:
    for path in out.iterdir() if out.exists() else ():
        path.unlink()
    out.rmdir() if out.exists() else None
