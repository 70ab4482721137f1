"""How a run stands, as `megatrain inspect` says it: of a real one while it trains, and of what others left."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import InterruptedRunError, MegatrainError
from megatrain_ray.report.run_state import Fault, RunState, State, read_state
from megatrain_ray.run import run_lock
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import History, read_history
from megatrain_ray.run.run_lock import hold_lock, lock_holder
from tests.support.runs import ROOT, cli_here, command, rows, write_config
from tests.support.runs import config as run_config
from tests.support.settings import config

SHAPE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
COME_S = 120.0
POLL_S = 0.1


def await_that(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + COME_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)


def pid_of(run_dir: Path, role: str) -> int:
    processes = json.loads((run_dir / "processes.json").read_text())["processes"]
    return next(process["pid"] for process in processes if process["role"] == role)


def told(run_dir: Path) -> list[str]:
    """Return the lines that `inspect` prints about the run's state."""
    done = cli_here("inspect", str(run_dir))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line.strip() for line in lines[lines.index("state") + 1 : lines.index("result")]]


@pytest.mark.long
@pytest.mark.ray
def test_a_live_run_one_of_whose_processes_dies_and_then_its_driver(tmp_path: Path, ray_address: str) -> None:
    run_dir, steps = tmp_path / "run", 1_000_000
    path = write_config(tmp_path / "config.yaml", run_config(run_dir, SHAPE, train__steps=steps, save_every=None))
    with (tmp_path / "output.txt").open("w") as output:
        environment = {**os.environ, "RAY_ADDRESS": ray_address}
        run = subprocess.Popen(command("train", str(path)), stdout=output, stderr=output, cwd=ROOT, env=environment)
    try:
        await_that(lambda: len(rows(run_dir)) > 2, "no step came")
        first, at, left, faults, free = told(run_dir)
        assert first.startswith(f"running, process {run.pid} on ")
        assert int(at.split()[1]) > 2
        assert f" of {steps}, " in at
        assert left.startswith("about ")
        assert faults == "no process died"
        assert free.endswith("free on the disk of run_dir")
        os.kill(pid_of(run_dir, "optimizer shard 0"), signal.SIGKILL)
        await_that(lambda: any(row["what"] == "replaced" for row in read_history(run_dir)), "nobody was replaced")
        lines = told(run_dir)
        assert lines[0].startswith("running")
        assert "deaths of processes: 1; the last ones:" in lines
        assert any(line.startswith("optimizer shard 0 died after step ") and "replaced in" in line for line in lines)
        run.kill()
        run.wait(COME_S)
        assert (
            told(run_dir)[0]
            == "died: killed, or its machine went down: nothing was written down; the same command resumes"
        )
    finally:
        run.kill()
        run.wait(COME_S)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """Return the files of a run of 10 steps, 4 of them made."""
    with RunDir.open(config(run_dir=str(tmp_path / "run"), train__steps=10)) as opened:
        opened.begin("{}", 0)
        for step in range(1, 5):
            opened.append({"step": step, "loss": 1.0, "step_s": 2.0 if step > 1 else 60.0})
    return RunFiles(tmp_path / "run")


def state_of(files: RunFiles, later_s: float = 0.0) -> RunState:
    return read_state(files, files.read_config(), files.rows(), files.metrics_file.stat().st_mtime + later_s)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, State.FINISHED),
        (MegatrainError("a process of the run died (GPU worker)"), State.FAILED),
        (InterruptedRunError("interrupted after step 4"), State.INTERRUPTED),
    ],
)
def test_an_end_that_was_written_down(files: RunFiles, error: MegatrainError | None, state: State) -> None:
    try:
        with History(files.path).of_start(0, 10, "abc"):
            if error:
                raise error
    except MegatrainError:
        pass
    found = state_of(files)
    assert (found.state, found.reason) == (state, str(error) if error else None)
    assert found.left_s is None


def test_a_start_without_an_end_is_up_while_the_lock_is_held(files: RunFiles) -> None:
    History(files.path).begin(0, 10, "abc")
    with hold_lock(files.path):
        found = state_of(files, 3.0)
    assert found.state is State.RUNNING
    assert (found.step, found.steps, found.age_s, found.step_s, found.left_s) == (4, 10, 3.0, 2.0, 12.0)
    assert state_of(files).state is State.DIED


def test_a_start_is_one_until_its_first_step(files: RunFiles) -> None:
    History(files.path).begin(4, 10, "abc")
    with hold_lock(files.path):
        assert state_of(files).state is State.STARTING
        assert not state_of(files, 1e6).is_quiet


def test_a_driver_that_has_written_its_end_is_no_longer_up(files: RunFiles) -> None:
    """It still holds the lock; another one that does has begun a new start."""
    with hold_lock(files.path):
        with History(files.path).of_start(0, 10, "abc"):
            pass
        assert state_of(files).state is State.FINISHED
        (files.path / "lock").write_text("1 on another machine")
        assert state_of(files).state is State.STARTING


def test_a_run_without_a_history(files: RunFiles) -> None:
    assert state_of(files).state is State.ENDED
    (files.path / "processes.json").write_text("{}")
    assert state_of(files).state is State.DIED


def test_a_run_that_is_quiet_is_called_so(files: RunFiles) -> None:
    with hold_lock(files.path):
        assert not state_of(files, 19.0).is_quiet
        quiet = state_of(files, 21.0)
    assert quiet.is_quiet
    assert "quiet: a step takes 2 s; a save or an evaluation, or it hangs: see logs/driver.log" in list(quiet.lines())


def test_faults_are_told_with_what_followed(files: RunFiles) -> None:
    history = History(files.path, lambda: 5.0)
    with history.of_start(0, 10, "abc"):
        history.died("optimizer shard 1", 1)
        history.died("arena owner", 1)
        history.replaced("optimizer shard 1", 1, 1.5)
        history.died("optimizer shard 1", 3)
    with history.of_start(2, 10, "abc"):
        history.replaced("optimizer shard 1", 2, 9.0)  # of nobody in this start
    found = state_of(files)
    assert found.faults == (
        Fault("optimizer shard 1", 5.0, 1, 1.5),
        Fault("arena owner", 5.0, 1, None),
        Fault("optimizer shard 1", 5.0, 3, None),
    )
    lines = list(found.lines())
    assert "deaths of processes: 3 in 2 starts; the last ones:" in lines
    assert "  optimizer shard 1 died after step 1, replaced in 1.5 s" in lines
    assert "  arena owner died after step 1, not replaced" in lines


def test_who_looks_at_the_lock_keeps_nobody_out(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    with hold_lock(tmp_path):
        assert str(lock_holder(tmp_path)).startswith(f"{os.getpid()} on ")
        (tmp_path / "kept").touch()
    assert lock_holder(tmp_path) is None
    with hold_lock(tmp_path):
        pass


def test_a_start_waits_for_who_only_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds a share lets go of it in that moment, here as soon as the start waits."""
    (tmp_path / "lock").touch()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    waited: list[float] = []

    def let_go(seconds: float) -> None:
        waited.append(seconds)
        os.close(looking)

    monkeypatch.setattr(run_lock.time, "sleep", let_go)
    with hold_lock(tmp_path):
        assert waited == [run_lock.GLANCE_S]
