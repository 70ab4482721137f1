"""`megatrain report`: the page of runs short and long, under way, ended and dead. In a browser: test_report_page.py."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.report.charts import MAX_BARS, MAX_BUCKETS, decimate, line_chart, stacked_chart
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import HISTORY_NAME, History
from megatrain_ray.run.run_lock import hold_lock
from megatrain_ray.units import format_bytes
from tests.support.report_runs import CAUSES, SPIKE, make_run, row_of
from tests.support.runs import cli_here, plan_of
from tests.support.settings import config

CURVE = re.compile(r'<g id="curve-([^"]+)">\s*<path d="([^"]*)"')
R = 1e-5  # rounding of coordinates
FRAME = re.compile(r'<g id="patch_2">\s*<path d="([^"]*)"')


def page_of(run_dir: Path) -> str:
    done = cli_here("report", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {run_dir / 'report.html'}\n"
    return (run_dir / "report.html").read_text()


def curves_of(page: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of the page's curves, by the name of the curve."""
    return {html.unescape(name): points_of(path) for name, path in CURVE.findall(page)}


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path)]


def frame_of(svg: str) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a chart's frame."""
    found = FRAME.search(svg)
    assert found is not None
    xs, ys = zip(*points_of(found[1]), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


@pytest.mark.parametrize("num_rows", [5, 10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_everything_is_on_the_page_whatever_the_length(tmp_path: Path, num_rows: int) -> None:
    run_dir = make_run(tmp_path / "run", num_rows, reason="the disk is full")
    page = page_of(run_dir)
    assert len(page) < 200_000
    assert curves_of(page).keys() == {
        "training", "held-out", "learning-rate", "gradient-norm", "tokens/s", "model-TFLOPS", "compute",
        *(cause.replace("_", "-") for cause in CAUSES),
    }  # fmt: skip
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        left, top, right, bottom = frame_of(svg)
        for name, points in curves_of(svg).items():
            assert points, name
            assert all(left - R <= x <= right + R and top - R <= y <= bottom + R for x, y in points), name
            assert len(points) <= max(2 * MAX_BUCKETS + 2, 5 * MAX_BARS), name
    text = html.unescape(page)
    assert "failed: the disk is full" in text
    assert "optimizer shard 0, in 1.6 s" in text
    for row in plan_of(run_dir).memory_items:
        assert row.num_bytes == 0 or f"{format_bytes(row.num_bytes)}</td>" in text
    assert "3.00 GiB tensors, the most so far measured" in text
    assert "disk, a step" in text
    assert "seq_len: 8" in text
    assert "max_failures" not in text, "it is the default"
    for told in (
        "pretrain, text.txt",
        "1 row of 8 tokens",
        "A <processor>",
        "best held-out loss",
        "first → last step",
    ):
        assert told in text
    assert "2.13.0" in text
    assert "The longest takes 60 s, beyond this frame." in text


def test_the_highest_and_the_lowest_are_kept() -> None:
    values = [1.0] * 100_000
    values[12_345], values[98_765] = SPIKE, -SPIKE
    kept = decimate(list(enumerate(values)))
    assert len(kept) <= 2 * MAX_BUCKETS + 2
    assert {(12_345, SPIKE), (98_765, -SPIKE), (0, 1.0), (99_999, 1.0)} <= set(kept)
    assert kept == sorted(kept)
    few = [(k, float(k)) for k in range(2 * MAX_BUCKETS)]
    assert decimate(few) == few


def test_bars_stack_to_the_whole_and_what_is_beyond_is_cut() -> None:
    rows = [(k + 1, {"compute": 3.0, "h2d": 1.0}) for k in range(1000)]
    chart = stacked_chart("seconds", rows, "s")
    assert chart is not None
    left, top, right, bottom = frame_of(chart.svg)
    compute, h2d = curves_of(chart.svg).values()
    quarter = pytest.approx(top + (bottom - top) / 4, abs=1e-3)
    assert sorted({y for _, y in compute}) == [quarter, bottom]
    assert sorted({y for _, y in h2d}) == [top, quarter]
    assert (min(compute)[0], max(compute)[0]) == pytest.approx((left, right))
    assert chart.note == ""
    cut = stacked_chart("seconds", [(0, {"compute": 400.0, "h2d": 0.0}), *rows], "s")
    assert cut is not None
    assert cut.note == "The longest takes 400 s, beyond this frame."
    left, top, right, bottom = frame_of(cut.svg)
    points = [point for curve in curves_of(cut.svg).values() for point in curve]
    assert all(left <= x <= right and top <= y <= bottom for x, y in points)
    assert min(y for _, y in points) == top


def test_one_point_is_a_dot_and_none_is_no_chart() -> None:
    chart = line_chart("loss", {"loss": [(7, 2.0)], "eval": []}, (7, 7), from_zero=False)
    assert chart is not None
    assert len(curves_of(chart.svg)["loss"]) == 1
    assert chart.svg.count("<use ") == 1
    assert line_chart("loss", {"loss": []}, (0, 1)) is None
    assert stacked_chart("seconds", [], "s") is None


def test_text_of_a_run_is_text(tmp_path: Path) -> None:
    """Nothing of its folder, its configuration or its history becomes a tag."""
    evil = "<script>alert(1)</script>&\"'"
    run_dir = make_run(tmp_path / "<img src=x>", 5, reason=evil, data__text_field=evil)
    page = page_of(run_dir)
    assert "<script" not in page
    assert "<img" not in page
    assert html.unescape(page).count(evil) >= 2
    assert "A &lt;processor&gt;" in page


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", 5))
    inside = re.compile(r"(?<=href=)\"#\w+\"|(?<=url\()#\w+(?=\))")
    assert not re.search(r"https?:|//|\bsrc=|\bhref=\S|url\([^)]|@import|<link|<script|<iframe", inside.sub("", page))
    assert "prefers-color-scheme: dark" in page


def test_a_run_without_a_step(tmp_path: Path) -> None:
    with RunDir.open(config(run_dir=str(tmp_path / "run"))) as opened:
        opened.begin("{}", 0)
        History(opened.path).begin(0, 4, "abc", changed={"train.lr": (0.001, 0.0005), "train.clip": (1.0, None)})
        page = page_of(opened.path)
    told = (
        "from step 0 to 4 on an unknown machine, train.lr 0.001 → 0.0005, train.clip 1.0 → None",
        "starting, process",
        "No update was made yet.",
        "No plan that this version reads.",
        "Nothing was compared",
    )
    for text in told:
        assert text in page
    assert "<svg" not in page


def test_a_run_that_is_still_going_and_one_that_died(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 5)
    with hold_lock(run_dir):
        assert '<p class="state running">running, process' in page_of(run_dir)
    assert '<p class="state died">died: killed' in page_of(run_dir)


def test_rows_of_other_versions_and_numbers_that_are_none(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 5)
    with RunFiles(run_dir).metrics_file.open("a") as file:
        for row in (
            {"step": 6}, {"step": 7, "loss": None, "step_s": 1.0, "exposed_s": None}, {"step": 8, "loss": "1"},
            *({**row_of(step, 20), **changed} for step, changed in enumerate(STRANGE, 9)),
        ):  # fmt: skip
            file.write(json.dumps(row) + "\n")
        file.write('{"step": 99, "lo')
    with RunFiles(run_dir).evaluations_file.open("a") as file:
        file.write('{"step": 6}\n{"step": 7, "eval_loss": "x", "perplexity": 1e308, "eval_tokens": null}\n')
    with (run_dir / HISTORY_NAME).open("a") as file:
        file.write('{"what": "end", "how": "unheard of", "unix_s": 1}\n{"what": "end", "unix_s": 1e308}\n')
        file.write('{"what": "start", "step": 3, "unix_s": 2}\n{"what": "start", "step": "x", "unix_s": 2}\n')
    page = page_of(run_dir)
    assert len(curves_of(page)["training"]) == 5 + 4
    assert "→ not finite<" in page
    assert "Dotted lines: the run was started again after step 3." in page
    assert page.count('id="resume-3"') == 5, "in every chart with lines"
    inspected = cli_here("inspect", str(run_dir))
    assert inspected.returncode == 0, inspected.stderr
    assert "incomplete row: ['grad_norm', 'lr', 'skipped', 'tokens_per_s'] missing" in inspected.stdout


# What a version never wrote into a row, but an editor or a damaged disk may.
HUGE = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "model_tflops", "hbm_peak_bytes", "host_bytes", "tokens")
STRANGE: list[dict[str, Any]] = [
    dict.fromkeys(HUGE, 1e308), dict.fromkeys(HUGE, 10**400), dict.fromkeys(HUGE, -1e308),
    dict.fromkeys(HUGE, "x"), {"loss": [1], "lr": {}, "skipped": "no"}, {"exposed_s": [1, 2]}, {"exposed_s": "x"},
    {"exposed_s": {"h2d": None}}, {"exposed_s": {"other": 1.0}}, {"step": 10**30}, {"loss": None, "step_s": None},
    {"loss": None, "lr": None, "tokens_per_s": None, "skipped": None, "grad_norm": True},
]  # fmt: skip


def test_out_names_another_file_and_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 5)
    done = cli_here("report", str(run_dir), "--out", str(tmp_path / "mine.html"))
    assert done.returncode == 0
    assert (tmp_path / "mine.html").exists()
    assert not (run_dir / "report.html").exists()
    done = cli_here("report", str(tmp_path))
    assert done.returncode == 2
    assert "holds no run" in done.stderr
