"""benchmarks/README.md: the table of speed has the figures of its raw files, and every raw file is named on a page."""

from __future__ import annotations

import json
import re

import pytest

from tests.test_layering import ROOT

FOLDER = ROOT / "benchmarks"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| `[^|]+\| [^|]+\| (?P<step>[\d.]+) \| (?P<tflops>\d+) \| (?P<predicted>[\d.]+) "
    r"\| (?P<hbm>[\d.]+)\+(?P<host>[\d.]+) \| (?P<commit>\w+)(?P<changes>\+?) \| \[json\]\((?P<raw>\S+)\) \|$",
    re.MULTILINE,
)
ROWS = [match.groupdict() for match in ROW.finditer(PAGE)]


def printed_like(value: float, text: str) -> str:
    return f"{value:.{len(text.partition('.')[2])}f}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["raw"].split("/")[-1])
def test_a_row_has_the_figures_of_its_raw_file(row: dict[str, str]) -> None:
    report = json.loads((FOLDER / row["raw"]).read_text(encoding="utf-8"))
    measured = {
        "step": report["step_s"]["median"],
        "tflops": report["model_tflops"],
        "predicted": report["prediction"]["step_s"],
        "hbm": report["memory"]["hbm_bytes"] / 1e9,
        "host": report["memory"]["pss_bytes"] / 1e9,
    }
    assert {name: row[name] for name in measured} == {name: printed_like(x, row[name]) for name, x in measured.items()}
    assert report["commit"].startswith(row["commit"])


def test_there_are_rows() -> None:
    assert len(ROWS) == 45


def test_every_raw_file_is_named_and_there() -> None:
    pages = PAGE + (FOLDER / "history.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(results/([^)]+)\)", pages))
    assert named == {path.name for path in (FOLDER / "results").iterdir()}
