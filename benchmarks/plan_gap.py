"""Measures how far `make_plan` is from the fastest plan there is, by predicted seconds of a step: nothing is run.

Small models with two blocks are drawn (tests/support/plan_cases.py), and compared with every plan that is possible for
them (tests/support/exhaustive.py).

    python -m benchmarks.plan_gap OUT.json FIRST LAST [--no-disk] [--minutes 30]

For each case from FIRST to LAST, OUT.json has its gap (0.03: the fastest plan takes 3 % less; below 0.005 it counts as
0) and the seconds that the search through all plans took. `--no-disk`: the same models with plenty of host memory and
no disk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.engine.planner.memory import spill_bytes
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import CapacityError
from megatrain_ray.machine.environment import commit, hardware
from tests.support.exhaustive import Exhaustive
from tests.support.plan_cases import KINDS, PLENTY, SMALL_EXTENTS, Case, case

LEAST_GAP = 0.005  # smaller gaps are not searched for: plans that cannot be faster by more are not simulated
TOO_FAR = 0.03


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Makes a constant of the product smaller: slots of whole extents would take all memory of models of this size.
    spill_bytes.EXTENT_ELEMENTS = SMALL_EXTENTS  # type: ignore[misc]
    end_s = time.monotonic() + 60 * options.minutes
    found: dict[int, dict[str, float]] = {}
    for number in range(options.first, options.last + 1):
        if time.monotonic() > end_s:
            print(f"cut off before {number}")
            break
        drawn = case(number) if KINDS[number % len(KINDS)].num_blocks == 2 else None
        if drawn is not None and (measured := gap(without_disk(drawn) if options.no_disk else drawn)):
            found[number] = measured
            print(number, *(f"{key}={value:.4g}" for key, value in measured.items()), flush=True)
    gaps = [measured["gap"] for measured in found.values()]
    too_far = sum(each > TOO_FAR for each in gaps)
    print(f"{too_far} of {len(gaps)} beyond {TOO_FAR:.0%}, at most {max(gaps, default=0):.1%}")
    report: dict[str, Any] = {
        "commit": commit(),
        "hardware": hardware("cpu"),
        "no_disk": options.no_disk,
        "cases": found,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def without_disk(drawn: Case) -> Case:
    return drawn._replace(machine=replace(drawn.machine, spill=None, ram_bytes=PLENTY.ram_bytes))


def gap(drawn: Case) -> dict[str, float] | None:
    """Return a case's step time, gap and search time; None if nothing fits."""
    try:
        plan = make_plan(*drawn)
    except CapacityError:
        return None
    assert plan.prediction is not None
    start_s, step_s = time.monotonic(), plan.prediction.step_s
    best = Exhaustive(*drawn).faster_than(step_s / (1 + LEAST_GAP))
    least_s = step_s if best is None or best.prediction is None else best.prediction.step_s
    return {"step_s": step_s, "gap": step_s / least_s - 1, "seconds": time.monotonic() - start_s}


if __name__ == "__main__":
    raise SystemExit(main())
