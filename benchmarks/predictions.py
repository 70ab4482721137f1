"""Compares what plans predicted with what was measured: step time, device memory and host memory of each report.

    python -m benchmarks.predictions REPORT.json … [--rows]

With `--rows` the rows of each plan's device memory follow, and what was measured of them.

Reports are those of `megatrain bench --json` or benchmarks.rows. Device memory is the GPU worker's by NVML. If that is
unknown, it is the peak that tensors took plus the plan's context. Host memory is that of all processes of the run
(PSS), including Ray's own. If layers shared host memory, the prediction is reduced by what they shared. A prediction
outside its tolerance has a mark.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from megatrain_ray.engine.plan.plan import ALLOCATOR, BESIDE_TENSORS, CONTEXT, EXCHANGE

TOLERANCES = {"step": 0.10, "HBM": 0.05, "host": 0.05}
GB = 1e9


class Pair(NamedTuple):
    """Holds a predicted and a measured value, both in seconds of a step or both in GB."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return the error of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1

    def is_off(self, name: str) -> bool:
        return abs(self.error) > TOLERANCES[name]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args(argv)
    reports = {path.stem: json.loads(path.read_text()) for path in options.reports}
    found = {name: pairs_of(report) for name, report in reports.items()}
    table = Table(box=None)
    table.add_column("report", overflow="fold")
    for name in TOLERANCES:
        table.add_column(f"{name}, {'s' if name == 'step' else 'GB'}", justify="right", no_wrap=True)
    for report, pairs in found.items():
        table.add_row(report, *(_cell(name, pairs.get(name)) for name in TOLERANCES))
    Console(width=120).print(table)
    for line in totals(list(found.values())):
        print(line)
    for name, report in reports.items() if options.rows else ():
        print(name, *device_rows(report), sep="\n")
    return 0


def pairs_of(report: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the pairs of a report by name, without those that were not predicted or not measured."""
    rows, memory = report["plan"].get("memory_items") or report["plan"]["rows"], report["memory"]
    sizes = {tier: sum(row["num_bytes"] for row in rows if row["tier"] == tier) for tier in ("hbm", "host")}
    pairs = {}
    if prediction := report["prediction"]:
        pairs["step"] = Pair(prediction["step_s"], report["step_s"]["median"])
    if report["plan"]["device"] == "cuda":
        context = sum(row["num_bytes"] for row in rows if row["name"] in BESIDE_TENSORS)
        measured = memory["hbm_bytes"] or memory["hbm_peak_bytes"] + context
        pairs["HBM"] = Pair(sizes["hbm"] / GB, measured / GB)
    else:  # device memory is host memory
        sizes["host"] += sizes["hbm"]
    if aliased := report.get("aliased"):
        sizes["host"] -= aliased["planned_bytes"] - aliased["held_bytes"]
    pairs["host"] = Pair(sizes["host"] / GB, memory["pss_bytes"] / GB)
    return pairs


def device_rows(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each row of a plan's device memory, then sums beside what was measured, in MB."""
    rows, memory = report["plan"].get("memory_items") or report["plan"]["rows"], report["memory"]
    planned = {row["name"]: row["num_bytes"] for row in rows if row["tier"] == "hbm"}
    yield from (f"  {name:22}{num_bytes / 1e6:10.0f}" for name, num_bytes in planned.items() if num_bytes)
    peak, held, nvml = memory["hbm_peak_bytes"], memory.get("hbm_held_bytes"), memory["hbm_bytes"]
    context = sum(planned.get(name, 0) for name in (CONTEXT, EXCHANGE))
    total = sum(planned.values())
    sums = {
        "tensors, peak": (total - context - planned.get(ALLOCATOR, 0), peak),
        "allocator, held": (total - context, held),
        "context": (context, nvml and held and nvml - held),
        "all, NVML": (total, nvml),
    }
    for name, (plan, measured) in sums.items():
        told = f"measured {measured / 1e6:10.0f}  {(plan - measured) / 1e6:+8.0f}" if measured else "not measured"
        yield f"= {name:22}{plan / 1e6:10.0f}  {told}"
    yield f"  retries of the allocator: {memory.get('hbm_retries', 'not counted')}"


def totals(found: Sequence[Mapping[str, Pair]]) -> Iterator[str]:
    """Yield a line for each name: how many predictions are within their tolerance, and the largest error."""
    for name, tolerance in TOLERANCES.items():
        pairs = [pairs[name] for pairs in found if name in pairs]
        if pairs:
            right = sum(not pair.is_off(name) for pair in pairs)
            furthest = max((pair.error for pair in pairs), key=abs)
            yield f"{name}: {right} of {len(pairs)} within {tolerance:.0%}; the furthest {furthest:+.1%}"


def _cell(name: str, pair: Pair | None) -> str:
    if pair is None:
        return "–"
    mark = " !" if pair.is_off(name) else "  "
    return f"{pair.predicted:.3g} / {pair.measured:.3g} {pair.error:+.1%}{mark}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
