"""`ray job submit` works on a head, from nothing but a checkout and with the package installed.

Tested are logs, status, stop and the same command once more, with a token and without.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatrain_ray.io.saves.save_folder import list_saves
from megatrain_ray.run.run_processes import _read as recorded
from tests.support.ray_head import Head, commands_under, end_family, ray_head
from tests.support.runs import ROOT, assert_equals_reference, cli_here, config, rows, write_config
from tests.support.tiny import build_tiny

pytestmark = pytest.mark.ray

STEPS = 60  # of some 50 ms: a run is stopped or killed long before its end
SAVE_EVERY = 4
WAIT_S = 120.0
TOKEN = "0123456789abcdef" * 4
SECRETS = {"WANDB_API_KEY": "secret-of-a-tracker", "HF_TOKEN": "hf_secret-of-the-hub", "RAY_AUTH_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that a clone has, as they are here."""
    folder = tmp_path_factory.mktemp("clone") / "megatrain-ray"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0")[:-1]:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of packages that has this one, as an image has it."""
    site = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(checkout)], check=True)
    return site


def until(met: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < deadline_s, f"{what}: not within {WAIT_S:.0f} s"
        time.sleep(0.05)  # for the run, not for the test


@contextmanager
def frozen(run_dir: Path, role: str) -> Iterator[None]:
    """Stop a process of the run during the block, like a GPU or a disk that hangs."""
    pid = next(process.pid for process in recorded(run_dir / "processes.json") if process.role == role)
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def says(head: Head, job_id: str, text: str) -> bool:
    return text in (head.folder / "session_latest" / "logs" / f"job-driver-{job_id}.log").read_text()


def command_of(config_file: str) -> str:
    """Says which package it runs, too."""
    return f"python -c 'import megatrain_ray as m; print(m.__file__)'; exec python -m megatrain_ray train {config_file}"


def tree_of(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"hardware__num_shards": 2, "train__deterministic": True, "train__steps": STEPS, **changes}
    return config(folder / "run", build_tiny(folder / "model"), **settings)


def test_a_checkout_is_enough_and_a_stop_saves_first(checkout: Path, tmp_path: Path) -> None:
    """There is no token.

    deploy/runtime_env.yaml gives the time for the save, and leaves out what a job does not need.
    """
    tree = tree_of(tmp_path, data__path="examples/data/tinyshakespeare.txt")
    write_config(checkout / "job.yaml", tree)
    run = tmp_path / "run"
    options = ("--working-dir", str(checkout), "--runtime-env", f"{checkout}/deploy/runtime_env.yaml")
    with ray_head(RAY_AUTH_MODE="disabled") as head:
        job_id = head.submit(*options, entrypoint=command_of("job.yaml"))
        until(lambda: len(rows(run)) >= 4, "four steps")
        with frozen(run, "GPU worker"):
            assert head.job("stop", "--no-wait", job_id).returncode == 0
            until(lambda: says(head, job_id, "interrupted: saving, then stopping"), "SIGTERM")
        until(lambda: "was stopped" in head.status(job_id), "the job's end")
        log = head.logs(job_id)
        [saved] = list_saves(run / "saves")
        assert 4 <= saved == len(rows(run)) < STEPS
        assert f"interrupted after step {saved}, saved at step {saved}; the same command resumes" in log
        assert "/working_dir_files/_ray_pkg_" in log.split("megatrain_ray/__init__.py")[0].splitlines()[-1]
        assert "warning: `ray job stop`" not in log
        assert_left_out(head)
        again = head.run(*options, entrypoint=command_of("job.yaml"))
    assert again.returncode == 0, again.stdout
    assert "succeeded" in again.stdout
    assert f"resuming from the save of step {saved}" in again.stdout
    assert f"done: step {STEPS}" in again.stdout
    assert_equals_reference(run, tree, tmp_path / "out")


@pytest.mark.long
def test_a_job_goes_on_after_its_driver_and_after_rays_own_processes_were_killed(
    installed: Path, tmp_path: Path
) -> None:
    """The same command goes on, on the same head, and on a new one in place of one of which nothing is left."""
    tree = tree_of(tmp_path, save_every=2)
    write_config(tmp_path / "job.yaml", tree)
    run, entrypoint = tmp_path / "run", command_of(str(tmp_path / "job.yaml"))
    with ray_head(RAY_AUTH_MODE="disabled", PYTHONPATH=str(installed)) as head:
        job_id = head.submit(entrypoint=entrypoint)
        until(lambda: list_saves(run / "saves"), "a save")
        driver_of(head).kill()
        until(lambda: "failed" in head.status(job_id), "the job's end")
        first = list_saves(run / "saves")[-1]
        again = head.submit(entrypoint=entrypoint)
        until(lambda: list_saves(run / "saves")[-1] > first, "another save")
        with frozen(run, "GPU worker"):
            assert f"resuming from the save of step {first}" in head.logs(again)
            end_family(head.process)
    second = list_saves(run / "saves")[-1]
    assert first < second < STEPS
    with ray_head(RAY_AUTH_MODE="disabled", PYTHONPATH=str(installed)) as head:
        ended = head.run(entrypoint=entrypoint)
    assert ended.returncode == 0, ended.stdout
    assert f"resuming from the save of step {second}" in ended.stdout
    assert_equals_reference(run, tree, tmp_path / "out")


def driver_of(head: Head) -> psutil.Process:
    started = commands_under(head.process.pid)
    return next(psutil.Process(pid) for pid, words in started if words[1:4] == ["-m", "megatrain_ray", "train"])


def assert_left_out(head: Head) -> None:
    [package] = (head.folder / "session_latest" / "runtime_resources" / "working_dir_files").glob("_ray_pkg_*/")
    assert {"megatrain_ray", "io", "engine", "examples"} <= {path.name for path in package.iterdir()}
    assert not {"tests", "benchmarks", ".git", ".venv"} & {path.name for path in package.iterdir()}
    assert (package / "megatrain_ray" / "io" / "words" / "words.c").is_file()


@pytest.mark.long
def test_the_installed_package_is_enough_and_a_save_cut_short_costs_no_earlier_one(
    installed: Path, tmp_path: Path
) -> None:
    """There is a token, which nothing that the run writes has.

    Ray's own 3 s are too few: a shard cannot write its part.
    """
    tree = tree_of(tmp_path, save_every=SAVE_EVERY)
    folder, run = tmp_path / "job", tmp_path / "run"
    folder.mkdir()
    write_config(folder / "job.yaml", tree)
    options = ("--working-dir", str(folder))
    with ray_head(RAY_AUTH_MODE="token", PYTHONPATH=str(installed), **SECRETS) as head:
        job_id = head.submit(*options, entrypoint=command_of("job.yaml"))
        until(lambda: list_saves(run / "saves"), "a save")
        with frozen(run, "optimizer shard 1"):
            saves = list_saves(run / "saves")
            stopped = head.job("stop", job_id)
        assert "was stopped" in stopped.stdout
        log = head.logs(job_id)
        assert f"{installed}/megatrain_ray/__init__.py" in log
        assert "warning: `ray job stop` kills this run 3 s after" in log
        assert "set RAY_JOB_STOP_WAIT_TIME_S=20 in the env_vars" in log
        assert "interrupted: saving" in log
        assert "the same command resumes" not in log
        assert list_saves(run / "saves") == saves
        inspected = cli_here("inspect", str(run), "--verify")
        assert inspected.returncode == 0, inspected.stdout
        again = head.run(*options, entrypoint=command_of("job.yaml"))
        refused = head.job("list", RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")
    assert refused.returncode != 0
    assert "Authentication required" in refused.stderr
    assert again.returncode == 0, again.stdout
    assert f"resuming from the save of step {saves[-1]}" in again.stdout
    assert_equals_reference(run, tree, tmp_path / "out")
    assert secrets_in(run) == []
    assert not [secret for secret in SECRETS.values() for text in (log, again.stdout, stopped.stdout) if secret in text]


def secrets_in(run_dir: Path) -> list[Path]:
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert run_dir / "logs" / "driver.log" in files
    return [path for path in files for secret in SECRETS.values() if secret.encode() in path.read_bytes()]
