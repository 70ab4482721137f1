"""Compares what plans predicted with what was measured: step time, device memory and host memory of each report.

    python -m benchmarks.predictions REPORT.json …

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

from megatrain_ray.engine.plan.plan import CONTEXT, EXCHANGE

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
    found = {path.stem: pairs_of(json.loads(path.read_text())) for path in parser.parse_args(argv).reports}
    table = Table(box=None)
    table.add_column("report", overflow="fold")
    for name in TOLERANCES:
        table.add_column(f"{name}, {'s' if name == 'step' else 'GB'}", justify="right", no_wrap=True)
    for report, pairs in found.items():
        table.add_row(report, *(_cell(name, pairs.get(name)) for name in TOLERANCES))
    Console(width=120).print(table)
    for line in totals(list(found.values())):
        print(line)
    return 0


def pairs_of(report: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the pairs of a report by name, without those that were not predicted or not measured."""
    rows, memory = report["plan"].get("memory_items") or report["plan"]["rows"], report["memory"]
    sizes = {tier: sum(row["num_bytes"] for row in rows if row["tier"] == tier) for tier in ("hbm", "host")}
    pairs = {}
    if prediction := report["prediction"]:
        pairs["step"] = Pair(prediction["step_s"], report["step_s"]["median"])
    if report["plan"]["device"] == "cuda":
        context = sum(row["num_bytes"] for row in rows if row["name"] in (CONTEXT, EXCHANGE))
        measured = memory["hbm_bytes"] or memory["hbm_peak_bytes"] + context
        pairs["HBM"] = Pair(sizes["hbm"] / GB, measured / GB)
    else:  # device memory is host memory
        sizes["host"] += sizes["hbm"]
    if aliased := report.get("aliased"):
        sizes["host"] -= aliased["planned_bytes"] - aliased["held_bytes"]
    pairs["host"] = Pair(sizes["host"] / GB, memory["pss_bytes"] / GB)
    return pairs


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
