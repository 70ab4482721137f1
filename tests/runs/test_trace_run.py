"""A timeline of a whole run, through the command line and real actors: one clock, rows that Perfetto takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatrain_ray.accounting.trace_file import Event, busy_share, read_trace
from tests.support.runs import cli_here, config, plan_of, write_config
from tests.support.tiny import build_tiny
from tests.support.traces import begin, check_format, finish

SPLIT = r"[0-9.e-]+ s: compute [0-9.]+"


def spans(found: Iterable[Event], name: str) -> list[Event]:
    return [span for span in found if span["name"] == name]


def test_a_timeline_of_some_steps_and_the_save_in_them(tmp_path: Path, ray_address: str) -> None:
    """The save of step 3 is written in them, since that of step 6 waits for its end."""
    model = build_tiny(tmp_path / "model")
    tree = config(
        tmp_path / "run", model, hardware__num_shards=2, train__steps=7, save_every=3, log__trace=[3, 6],
        train__batch_size=None, train__micro_batch_size=4,
    )  # fmt: skip
    done = cli_here("train", str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    path = tmp_path / "run" / "trace_steps_3_6.json"
    assert f"traced steps 3 to 6: {path} (open it at" in done.stderr
    events = read_trace(path)
    threads = check_format(events)
    check_rows(threads)
    check_one_clock(threads, [layer.name for layer in plan_of(tmp_path / "run").layers])
    shown = f"{busy_share(events):.1%}"
    inspected = cli_here("inspect", str(tmp_path / "run")).stdout
    assert f"trace_steps_3_6.json: the compute stage worked {shown} of the time" in inspected
    assert re.search(rf"^mean step\n  {SPLIT}", inspected, re.MULTILINE)
    assert len(re.findall(rf"^step \d/7  .* left  {SPLIT}", done.stdout, re.MULTILINE)) == 7
    log = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert len(re.findall(rf"step \d  {SPLIT}", log)) == 7


def check_rows(threads: dict[tuple[str, str], list[Event]]) -> None:
    gpu = {row for process, row in threads if process == "GPU worker"}
    assert gpu == {
        "steps", "compute", "h2d", "d2h",
        "event loop: uploads", "event loop: gradients", "event loop: landings",
    }  # fmt: skip
    steps = [s["name"] for s in threads["GPU worker", "steps"] if s["cat"] == "work"]
    assert steps == [name for step in range(3, 7) for name in (f"step {step}", "commit")]
    for shard in ("optimizer shard 0", "optimizer shard 1"):
        assert {"update", "wait gradient"} <= {span["name"] for span in threads[shard, "updates"]}
        saving = {s["name"] for (process, row), found in threads.items() for s in found if row.startswith("save")}
        assert {f"{what} {kind}" for what in ("read", "write") for kind in ("master", "m", "v")} <= saving
    assert [span["name"] for span in threads["data", "batches"]] == ["batch 4", "batch 5", "batch 6", "batch 7"]
    assert {"row of step 3", "commit save 3", "row of step 6"} <= {s["name"] for s in threads["driver", "driver"]}


def check_one_clock(threads: dict[tuple[str, str], list[Event]], layers: list[str]) -> None:
    """Assert that what happened in one process after something in another stands after it.

    A shard's update comes after the landing of its gradient and the commit, the next upload after the update.
    """
    landings = spans(threads["GPU worker", "event loop: landings"], "land")
    uploads = spans(threads["GPU worker", "h2d"], "load")
    step, next_step, *_ = (s for s in threads["GPU worker", "steps"] if s["name"].startswith("step "))
    commit = spans(threads["GPU worker", "steps"], "commit")[0]
    for shard in ("optimizer shard 0", "optimizer shard 1"):
        for layer in layers:
            landed = next(s for s in landings if s["args"]["layer"] == layer)
            updates = [s for s in spans(threads[shard, "updates"], "update") if s["args"]["layer"] == layer]
            update = next(s for s in updates if begin(s) >= begin(commit))
            upload = next(s for s in uploads if s["args"]["layer"] == layer and begin(s) >= begin(next_step))
            assert begin(step) < begin(landed) <= begin(update) < finish(update) <= begin(upload)
            assert update["args"]["GB/s"] > 0
