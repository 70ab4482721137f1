"""The table of what plans predicted beside what was measured, of reports that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predictions
from benchmarks.predictions import device_rows, pairs_of, totals

RESULTS = Path(predictions.__file__).parent / "results"
SMALL = RESULTS / "2026-11-22_h200_3.1b.json"
OTHER = RESULTS / "2026-11-22_h200_7.6b_16.json"


def report(file: Path = SMALL, **memory: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(file.read_text())
    return tree | {"memory": tree["memory"] | memory}


def test_pairs_are_those_of_the_report() -> None:
    tree = report()
    pairs = pairs_of(tree)
    assert pairs["step"] == (tree["prediction"]["step_s"], tree["step_s"]["median"])
    sizes = {tier: sum(r["num_bytes"] for r in tree["plan"]["rows"] if r["tier"] == tier) for tier in ("hbm", "host")}
    assert pairs["HBM"] == (sizes["hbm"] / 1e9, tree["memory"]["hbm_bytes"] / 1e9)
    assert pairs["host"] == (sizes["host"] / 1e9, tree["memory"]["pss_bytes"] / 1e9)
    assert {name: round(pair.error, 3) for name, pair in pairs.items()} == {
        "step": -0.001,
        "HBM": 0.008,
        "host": -0.079,
    }
    assert {name for name, pair in pairs.items() if pair.is_off(name)} == {"host"}
    without_nvml = pairs_of(report(hbm_bytes=None))["HBM"].measured
    assert without_nvml == pytest.approx((tree["memory"]["hbm_peak_bytes"] + (1 << 30)) / 1e9)


def test_on_the_cpu_device_memory_is_host_memory() -> None:
    tree = report()
    on_cpu = pairs_of(tree | {"plan": tree["plan"] | {"device": "cpu"}, "prediction": None})
    assert set(on_cpu) == {"host"}
    assert on_cpu["host"].predicted == pytest.approx(sum(row["num_bytes"] for row in tree["plan"]["rows"]) / 1e9)


def test_the_table_and_its_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert predictions.main([str(SMALL), str(OTHER)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [SMALL.stem, OTHER.stem]
    assert [line.count("!") for line in lines[1:3]] == [1, 1]
    assert lines[3:] == [
        "step: 1 of 2 within 10%; the furthest +12.5%",
        "HBM: 2 of 2 within 5%; the furthest +4.8%",
        "host: 1 of 2 within 5%; the furthest -7.9%",
    ]
    assert not list(totals([]))


def test_rows_of_device_memory_beside_what_was_measured() -> None:
    """What the allocator held is known from newer reports; the rest that NVML counts is the context."""
    lines = list(device_rows(report(hbm_bytes=145_000_000_000, hbm_held_bytes=144_200_000_000, hbm_retries=3)))
    sums = {line[2:24].strip(): line.split()[-2:] for line in lines if line.startswith("=")}
    assert sums == {
        "tensors, peak": ["143255", "+1141"], "allocator, held": ["144200", "+196"], "context": ["800", "+274"],
        "all, NVML": ["145000", "+470"],
    }  # fmt: skip
    assert lines[-1] == "  retries of the allocator: 3"
    assert sum("not measured" in line for line in device_rows(report())) == 2


def test_of_aliased_memory_what_was_held_is_predicted() -> None:
    tree = report(RESULTS / "2026-11-23_h200_72b_aliased.json")
    assert abs(pairs_of(tree)["host"].error) < 0.05
    assert pairs_of(tree | {"aliased": None})["host"].error > 20
