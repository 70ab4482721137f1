"""`megatrain inspect` of a run with saves, of one without, and of ones with a damaged save."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.cli import main
from megatrain_ray.console.run_summary import summarize
from megatrain_ray.console.text_charts import HEIGHT, MIN_WIDTH, draw
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest, ParameterEntry, SaveTiming
from megatrain_ray.io.saves.save_folder import commit_save, prepare_save, set_aside, write_part
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.run.best_evaluation import describe_harm
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_lock import hold_lock
from megatrain_ray.units import format_bytes
from tests.support.planned_steps import PROFILE, measured, planned, with_more_on_disk
from tests.support.saves import flip
from tests.support.settings import config


def save(saves: Path, step: int, timing: SaveTiming | None = None) -> None:
    """Write a save of one layer of 1024 elements of 4 bytes."""
    folder = prepare_save(saves, step)
    piece = Piece("embed", "m", 0, 1024, [memoryview(bytes([step]) * 4096)])
    manifest = Manifest(
        version=1,
        step=step,
        optimizer_step=step,
        num_skipped=0,
        precision="fp32",
        itemsize={"m": 4},
        layers=(LayerEntry("embed", 1024, (ParameterEntry("embed.weight", (1024,), 0),)),),
        data={},
        model={},
        config={},
        parts=(asyncio.run(write_part(folder, 0, [piece])),),
        timing=timing,
    )
    commit_save(saves, step, manifest)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three updates, the second skipped."""
    with RunDir.open(config(run_dir=str(tmp_path / "run"))) as opened:
        opened.begin("{}", 0)
        for step, loss in enumerate((2.5, float("nan"), 2.25), start=1):
            row = {"step": step, "loss": loss, "grad_norm": loss, "lr": 1e-4, "tokens_per_s": 12345.0}
            opened.append(row | {"skipped": step == 2})
    return tmp_path / "run"


def test_a_run_without_saves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--verify", "--config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: lines.index("state")] == [
        "run", "  model   model", "  data    pretrain, text.txt", "  step    1 row of 8 tokens",
    ]  # fmt: skip
    assert lines[lines.index("saves") :] == [
        "saves",
        "  none",
        "last rows",
        "  step 1        loss 2.5000  grad_norm 2.5000  lr 0.0001  12.3k tokens/s",
        "  step 2        loss not finite  grad_norm not finite  lr 0.0001  12.3k tokens/s  skipped",
        "  step 3        loss 2.2500  grad_norm 2.2500  lr 0.0001  12.3k tokens/s",
        "checksums",
        "  nothing to check",
    ]
    assert "    steps: 4" in lines


def test_a_run_that_holds_nothing_yet_is_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "chats.yaml").write_text("run_dir: runs/chats\n")
    assert main(["inspect", str(tmp_path / "chats.yaml")]) == 2
    told = f"{tmp_path / 'chats.yaml'} is a configuration, not the directory of its run; name that: runs/chats\n"
    assert capsys.readouterr().err == f"error: {told}"
    with hold_lock(tmp_path):
        assert main(["inspect", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith("state\n  starting: ")
        assert main(["report", str(tmp_path)]) == 2
        assert "the run is starting" in capsys.readouterr().err


def test_saves_with_their_size_and_cost_and_a_verdict_on_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run / "saves", 9)
    save(run / "saves", 10, SaveTiming(predicted_stall_s=0.5, stall_s=0.75, write_s=12.25, nbytes=4096))
    assert main(["inspect", str(run)]) == 0
    short = capsys.readouterr().out
    assert "checksums" not in short
    assert "seq_len" not in short
    assert main(["inspect", str(run), "--verify"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    first = lines.index("saves") + 1
    assert lines[first].startswith("  step 9 ")
    assert lines[first].endswith(" KiB")
    assert lines[first + 1].startswith("  step 10 ")
    assert len(lines[first + 1]) <= 80
    assert lines[first + 1].endswith(" KiB in 12.2 s, updates waited 0.8 s (0.5 s predicted)")
    assert out.endswith("checksums\n  step 10: good\n  step 9: good\n")


def test_a_damaged_save_is_named_and_exits_1_though_the_newest_is_good(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 4):
        save(run / "saves", step)
    flip(run / "saves" / "step_3" / "part_0.m", 0)
    assert main(["inspect", str(run), "--verify"]) == 1
    verdict = capsys.readouterr().out.split("checksums\n")[1].splitlines()
    assert verdict[:2] == ["  step 4: good", "  step 3: DAMAGED"]
    assert "part_0.m is damaged: m of embed" in verdict[2]


def test_a_damaged_manifest_and_a_save_set_aside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (3, 4, 5):
        save(run / "saves", step)
    set_aside(run / "saves", 5)
    flip(run / "saves" / "step_4" / "manifest.json", 10)
    assert main(["inspect", str(run), "--verify"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^  step_5.damaged .* KiB, set aside: nothing reads or deletes it$", out, re.MULTILINE)
    assert re.search(r"step 4: DAMAGED\n  .*step_4/manifest.json is damaged: .*\n  step 3: good\n$", out)


def test_curves_are_drawn_of_what_is_finite(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line.strip() for line in lines if line.strip() in ("loss", "tokens/s", "gradient norm")]
    assert titles == ["loss", "tokens/s", "gradient norm"]
    chart = lines[lines.index(next(line for line in lines if line.strip() == "loss")) :][:11]
    assert chart[-1].split() == ["1", "2", "3"]
    assert "2.50" in chart[2]
    assert any("2.25" in line for line in chart)


@pytest.mark.parametrize("width", [20, 38, 98])
@pytest.mark.parametrize("num_rows", [2, 3, 7, 12, 40, 2000])
@pytest.mark.parametrize("first", [0, 1999990])
def test_ticks_are_steps_in_their_order_and_lines_fit(num_rows: int, width: int, first: int) -> None:
    chart = list(draw([{"step": first + k, "loss": 1 / (k + 1)} for k in range(num_rows)], width))
    assert len(chart) == HEIGHT
    assert max(map(len, chart)) <= max(MIN_WIDTH, width)
    ticks = list(map(int, chart[-1].split()))
    assert ticks == sorted(set(ticks))
    assert (ticks[0], ticks[-1]) == (first, first + num_rows - 1)
    values = [float(line.split("┤")[0]) for line in chart if "┤" in line]
    assert values == sorted(set(values), reverse=True)
    assert len(values) == 4


def test_one_row_is_no_curve_and_a_flat_one_has_its_value_beside_it() -> None:
    assert list(draw([{"step": 1, "loss": 2.0}])) == []
    chart = list(draw([{"step": k, "loss": 2.0} for k in (1, 2)], 38))
    (line,) = [line for line in chart if "2.00┤" in line]
    assert "⠒⠒" in line
    assert list(draw([{"step": k, "loss": math.nextafter(2.0, k)} for k in (1, 3)], 38))


def evaluation(step: int, loss: float | None) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "perplexity": loss, "eval_tokens": 1000, "eval_s": 2.0}


def test_evaluations_are_drawn_and_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.open(config(run_dir=str(run))) as opened:
        for step in (0, 2, 3):
            opened.append_evaluation(evaluation(step, 5.5 - step))
    save(run / "saves", 3)
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    chart = lines[lines.index(next(line for line in lines if line.strip() == "held-out loss")) :][:11]
    assert chart[-1].split()[0] == "0"
    assert "5.50" in chart[2]
    assert lines[lines.index("saves") + 1].startswith("  step 3, best  ")
    first = lines.index("last evaluations") + 1
    assert lines[first] == "  after step 0  eval_loss 5.5000  perplexity 5.5  1.00k tokens in 2s"
    assert lines[first + 3 :] == []
    result = lines[lines.index("result") + 1 :][:2]
    assert result == ["  loss, first → last step 2.5000 → 2.2500", "  best held-out loss      2.5000 after step 3"]
    with RunDir.open(config(run_dir=str(run))) as opened:
        opened.evaluations_file.unlink()
        for step in (0, 3):
            opened.append_evaluation(evaluation(step, 5.5 + step))
    assert main(["inspect", str(run)]) == 0
    ruined = capsys.readouterr().out
    assert "best held-out loss      8.5000 after step 3, worse than 5.5000 before training" in ruined


def test_the_last_and_the_best_evaluation_are_named_at_the_end() -> None:
    rows = [evaluation(0, 5.0), evaluation(2, 2.0), evaluation(4, 3.0)]
    last = "held out  after step 4  eval_loss 3.0000  perplexity 3  1.00k tokens in 2s"
    following = 'next      megatrain generate runs/x "PROMPT", megatrain export runs/x OUT_DIR'
    assert list(summarize([], Path("runs/x"), rows)) == [
        last, "          best: eval_loss 2.0000 after step 2", following
    ]  # fmt: skip
    of_chats = following.replace('"PROMPT"', "--chat")
    assert list(summarize([], Path("runs/x"), rows[-1:], chats=True)) == [last, of_chats]
    assert "nan" in next(summarize([], Path("runs/x"), [evaluation(4, None)]))
    of_good = {
        key: value for key, value in evaluation(4, 0.5).items() if key != "perplexity"
    }  # no bad answers, no margin
    assert next(summarize([], Path("runs/x"), [of_good])).endswith("eval_loss 0.5000  1.00k tokens in 2s")
    rows = [evaluation(0, 6.5), evaluation(4, 28.5)]
    ruined = list(summarize([], Path("runs/x"), rows, harm=describe_harm(rows)))
    assert ruined[1:3] == [
        "          best: eval_loss 6.5000 before training",
        "warning   held-out loss rose from 6.5000 to 28.5000; no evaluated save is better than the model before "
        "training; a lower train.lr may help",
    ]


def test_what_is_said_at_the_end() -> None:
    rows = [
        {
            "step": step, "step_s": step_s, "tokens_per_s": 1000.0 / step_s, "model_tflops": 2.0,
            "skipped": step == 2, "exposed_s": {"h2d": 0.0, "optimizer": 0.5, "data": 0.1},
            "hbm_peak_bytes": step << 30, "host_bytes": 1 << 20,
        }
        for step, step_s in ((1, 60.0), (2, 1.0), (3, 2.0), (4, 1.0))
    ]  # fmt: skip
    assert list(summarize(rows, Path("runs/x"))) == [
        "time      1m 04s in 4 steps, median 1 s, slowest 2 s",
        "speed     1.00k tokens/s, 2 model TFLOPS",
        "waited    optimizer 37.5%, data 7.5% of the time",
        "memory    4.00 GiB of the device at most, 1.00 MiB of shared host memory",
        "skipped   1 updates whose gradient was not finite",
        'next      megatrain generate runs/x "PROMPT", megatrain export runs/x OUT_DIR',
    ]
    assert list(summarize([], Path("runs/x"))) == []
    assert list(summarize([], Path("runs/x"), [evaluation(0, 5.0)], has_save=False))[1:] == [], (
        "nothing to generate with"
    )
    rising = [row | {"loss": loss} for row, loss in zip(rows, (6.5, 7.0, 9.0, 28.5), strict=True)]
    warning = "warning   training loss rose from 6.5000 to 28.5000; a lower train.lr may help"
    assert warning in list(summarize(rising, Path("runs/x")))
    assert warning not in list(summarize([row | {"loss": 6.5} for row in rising], Path("runs/x")))
    assert warning not in list(summarize([row | {"ratio_max": 1.0} for row in rising], Path("runs/x")))  # a policy
    tiny = [row | {"loss": loss} for row, loss in zip(rows, (1e-9, 2e-9, 5e-9, 9e-9), strict=True)]
    assert not any("warning" in line for line in summarize(tiny, Path("runs/x"))), "a teacher that is the student"
    assert "megatrain export 'runs/my x' OUT_DIR" in list(summarize(rows, Path("runs/my x")))[-1]
    idle = [row | {"exposed_s": {"h2d": 0.0}} for row in rows]
    assert "waited    for nothing" in list(summarize(idle, Path("runs/x")))


def test_what_the_disk_moved_is_said_at_the_end(tmp_path: Path) -> None:
    plan = with_more_on_disk(planned(PROFILE, spilled=True), PROFILE)
    moved = {"shards_read": 2 << 30, "shards_written": 0, "weights_read": 1 << 30, "activations_read": 0}
    usual = {
        "tokens_per_s": 1.0, "model_tflops": 2.0, "skipped": False, "host_bytes": 1, "disk_s": 1.5,
        "disk_bytes": {**moved, "activations_written": 0},
    }  # fmt: skip
    rows = [{**row, **usual} for row in measured(plan, PROFILE)]
    planned_bytes = format_bytes(2 * plan.written_bytes + plan.disk.weight_read_bytes)
    said = f"disk      3.00 GiB read and written a step, {planned_bytes} planned, 2.15 GB/s while it was at work"
    assert said in list(summarize(rows, tmp_path, plan=plan))
    for few, known in ((rows[:3], plan), (rows, None)):
        assert not any(line.startswith("disk") for line in summarize(few, tmp_path, plan=known))
