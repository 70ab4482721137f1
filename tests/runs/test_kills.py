"""Processes of real runs killed from outside, in named phases; the whole campaign is in benchmarks/kill_campaign."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.kill_campaign import checks
from benchmarks.kill_campaign.cases import (
    BACKWARD,
    DASHBOARD_AGENT,
    DATA,
    DRIVER,
    FORWARD,
    GPU,
    LANDED,
    LOG_MONITOR,
    OWNER,
    RUNTIME_ENV_AGENT,
    SHARD_0,
    SHARD_1,
    UPDATE,
    Outcome,
)
from benchmarks.kill_campaign.checks import OK
from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.processes import Role
from megatrain_ray.io.saves.save_folder import list_saves
from tests.support.fault_injection import END_S, SECOND_SAVE, kill, mid_update, prepare, training
from tests.support.runs import assert_equals_reference, cli_here, rows, write_config

pytestmark = pytest.mark.ray

RAY_END_S = 30.0  # in which a run ends without one of Ray's processes that it needs (docs/troubleshooting.md)


def test_whoever_dies_is_replaced(tmp_path: Path) -> None:
    """A shard, the arena owner, the GPU worker and the data process killed in one run, which ends as without deaths."""
    tree, path = prepare(tmp_path, train__steps=60, max_failures=4)
    with training(tmp_path, path) as run:
        kill(run, mid_update(0), SHARD_0)
        kill(run, UPDATE, OWNER)
        kill(run, BACKWARD, GPU)
        kill(run, FORWARD, DATA)
        assert run.process.wait(END_S) == 0, run.text()
        for name in ("optimizer shard 0", "arena owner", "GPU worker", "data"):
            assert run.text().count(f"{name} died and was replaced") == 1
        assert run.processes.await_end(5.0) == []
        assert checks.of_folders([run.process.pid]) == OK
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 61))
    assert checks.of_unfinished(tmp_path / "run") == OK


@pytest.mark.long
def test_shards_and_the_arena_owner_are_replaced(tmp_path: Path) -> None:
    """Four of them killed in one run, which ends as if nothing had happened."""
    tree, path = prepare(tmp_path, train__steps=80, max_failures=4)
    with training(tmp_path, path) as run:
        kill(run, mid_update(0), SHARD_0)
        kill(run, mid_update(1), SHARD_1)
        kill(run, UPDATE, OWNER)
        kill(run, mid_update(0), SHARD_0)
        assert run.process.wait(END_S) == 0, run.text()
        assert checks.of_message(run, Outcome.REPLACED, {Role.SHARD}) == OK
        for name, count in (("optimizer shard 0", 2), ("optimizer shard 1", 1), ("arena owner", 1)):
            assert run.text().count(f"{name} died and was replaced") == count
        assert run.processes.await_end(5.0) == []
        assert checks.of_folders([run.process.pid]) == OK
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    assert checks.of_unfinished(tmp_path / "run") == OK


@pytest.mark.long
def test_a_shard_that_dies_in_an_update_of_muon_is_replaced(tmp_path: Path) -> None:
    """Another one makes the same update from the gradient and the directions that still lie there."""
    tree, path = prepare(tmp_path, train__steps=10, train__optimizer="muon", train__muon={"ns_steps": 1})
    with training(tmp_path, path) as run:
        kill(run, mid_update(0), SHARD_0)
        assert run.process.wait(END_S) == 0, run.text()
        assert run.text().count("optimizer shard 0 died and was replaced") == 1
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")


@pytest.mark.long
def test_the_gpu_worker_and_the_data_process_are_replaced(tmp_path: Path) -> None:
    """They die in the backward, and while a committed update is made; nothing but the dead is started again."""
    tree, path = prepare(tmp_path, train__steps=60, max_failures=4, save_every=0)
    with training(tmp_path, path) as run:
        kill(run, BACKWARD, GPU)
        kill(run, FORWARD, DATA)
        kill(run, LANDED, GPU)
        assert run.process.wait(END_S) == 0, run.text()
        assert run.text().count("GPU worker died and was replaced") == 2
        assert run.text().count("data died and was replaced") == 1
        assert run.processes.await_end(5.0) == []
        assert checks.of_folders([run.process.pid]) == OK
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 61))


@pytest.mark.long
def test_what_dies_with_the_gpu_worker_is_made_again_from_the_last_save(tmp_path: Path) -> None:
    """Without clipping, updates begin in the backward, so a step cannot be made once more.

    Within the same run all other processes are started again, too.
    """
    tree, path = prepare(tmp_path, train__steps=24, train__clip=None)
    with training(tmp_path, path) as run:
        hit = kill(run, SECOND_SAVE, GPU)
        assert run.process.wait(END_S) == 0, run.text()
        assert f"; going on from the save of step {hit.committed[-1]} (failure 1 of at most 3)" in run.text()
        assert run.processes.await_end(5.0) == []
        assert checks.of_folders([run.process.pid]) == OK
    assert hit.committed
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 25))
    assert checks.of_unfinished(tmp_path / "run") == OK


@pytest.mark.long
def test_a_run_goes_on_without_rays_log_monitor_and_ends_with_an_agent(tmp_path: Path, ray_address: str) -> None:
    """Ray's raylet ends with each of its two agents, and all actors with the raylet."""
    tree, path = prepare(tmp_path, train__steps=40)
    with training(tmp_path, path) as run:
        kill(run, BACKWARD, LOG_MONITOR)
        kill(run, BACKWARD, DASHBOARD_AGENT)
        drivers = [_ends_with(run, Role.DASHBOARD_AGENT)]
    with training(tmp_path, path) as run:
        hit = kill(run, SECOND_SAVE, RUNTIME_ENV_AGENT)
        drivers.append(_ends_with(run, Role.RUNTIME_ENV_AGENT))
        assert checks.of_saves(tmp_path / "run", hit.committed) == OK
    assert cli_here("train", str(path)).returncode == 0
    assert checks.of_folders(drivers) == OK
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    assert checks.of_unfinished(tmp_path / "run") == OK


def _ends_with(run: LiveRun, role: Role) -> int:
    """Assert that the run ends in time, says what died and leaves nobody behind. Returns the pid of its driver."""
    assert run.process.wait(RAY_END_S) == 1, run.text()
    assert checks.of_message(run, Outcome.ENDED, {role}) == OK
    assert run.processes.await_end(5.0) == []
    return run.process.pid


@pytest.mark.long
def test_the_same_command_resumes_after_any_other_death(tmp_path: Path, ray_address: str) -> None:
    tree, path = prepare(tmp_path, train__steps=30)
    saves = tmp_path / "run" / "saves"
    with training(tmp_path, path) as run:
        hit = kill(run, SECOND_SAVE, DRIVER)
        assert run.process.wait(END_S) == -signal.SIGKILL
        assert checks.of_processes(run, Outcome.SILENT) == OK
        assert checks.of_saves(tmp_path / "run", hit.committed) == OK
        assert list_saves(saves) == list(hit.committed), "what was being written is no save"
        drivers = [run.process.pid]
    with training(tmp_path, write_config(tmp_path / "none.yaml", tree | {"max_failures": 0})) as run:
        kill(run, BACKWARD, GPU)
        assert run.process.wait(END_S) == 1
        assert checks.of_message(run, Outcome.ENDED, {Role.GPU}) == OK
        assert run.processes.await_end(5.0) == []
        drivers.append(run.process.pid)
    assert cli_here("train", str(path)).returncode == 0
    assert checks.of_folders(drivers) == OK
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "out")
    assert checks.of_unfinished(tmp_path / "run") == OK
