"""Ray's session folders: those of killed drivers are deleted, and nothing else that is called like them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatrain_ray.crew import ray_cluster as cluster_module
from megatrain_ray.crew import ray_daemons
from megatrain_ray.crew.ray_cluster import remove_left_sessions, session_folders
from megatrain_ray.crew.ray_daemons import Daemons
from megatrain_ray.errors import CapacityError, MegatrainError
from megatrain_ray.io.files.owned_folder import FolderKind, OwnedFolder
from tests.support.owned_folders import forget_maker, left_by_a_dead_process

END_S = 30.0
DRIVER = """
import sys
from megatrain_ray.crew.ray_cluster import cluster
with cluster(num_cpus=1, num_gpus=0):
    print("up", flush=True)
    sys.stdin.read()
"""
# A tracker's service is started while a cluster is up, and outlives it.
WITH_A_CHILD = """
import subprocess, psutil
from megatrain_ray.crew.ray_cluster import cluster
with cluster(num_cpus=1, num_gpus=0):
    child = subprocess.Popen(["sleep", "60"])
left = psutil.Process().children(recursive=True)
assert [p.pid for p in left] == [child.pid], left
child.kill()
"""


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that takes the place of /tmp."""
    monkeypatch.setattr(cluster_module, "SESSIONS", tmp_path)
    return tmp_path


def session(path: Path) -> Path:
    return left_by_a_dead_process(path, FolderKind.SESSION)


def aged(folder: Path, text: str = "precious") -> Path:
    """Make a folder of a user, with the oldest time there is."""
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text(text)
    (folder / ".lock").touch()  # which earlier releases took for their own
    os.utime(folder, (0, 0))
    return folder


def test_too_few_threads_and_no_room_are_told_before_ray_starts(
    sessions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "SESSIONS", sessions / "gone")
    message = rf"^cannot make {sessions}/gone/megatrain-.*: No such file or directory; Ray needs room in /tmp"
    with pytest.raises(MegatrainError, match=message), cluster_module._embedded(num_cpus=1, num_gpus=0):
        pass
    monkeypatch.setattr(cluster_module, "SESSIONS", sessions)
    monkeypatch.setattr(cluster_module, "free_threads", lambda: 189)
    message = r"^a start needs at least 190 threads, and 189 more may be started here; raise .*ulimit -u"
    with pytest.raises(CapacityError, match=message), cluster_module._embedded(num_cpus=2, num_gpus=0):
        pass
    assert list(sessions.iterdir()) == []


def test_what_only_has_the_name_of_a_session_stays(sessions: Path) -> None:
    stale = session(sessions / "megatrain-1-abc")
    users = [
        aged(sessions / "megatrain-ray-main"),
        aged(sessions / "megatrain-12-34567890"),
        aged(left_by_a_dead_process(sessions / "megatrain-run-7b", FolderKind.RUN)),
        aged(left_by_a_dead_process(sessions / "megatrain-bench-x", FolderKind.SCRATCH)),
    ]
    outside = session(sessions / "elsewhere")
    shutil.copytree(stale, sessions / "megatrain-1-backup")  # of its logs, by a user
    (sessions / "megatrain-1-link").symlink_to(outside)
    (sessions / "megatrain-1-file").touch()
    remove_left_sessions()
    assert not stale.exists()
    assert all((folder / "file").read_text() == "precious" for folder in users)
    assert outside.exists()
    rest = {folder.name for folder in (*users, outside)}
    assert {path.name for path in sessions.iterdir()} == rest | {
        "megatrain-1-backup", "megatrain-1-link", "megatrain-1-file",
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user at hand")
def test_those_of_another_user_stay(sessions: Path) -> None:
    theirs = session(sessions / "megatrain-1-abc")
    for path in (theirs, *theirs.iterdir()):
        os.chown(path, 65534, 65534)
    remove_left_sessions()
    assert theirs.exists()


def test_that_of_a_living_driver_stays(sessions: Path) -> None:
    held = OwnedFolder.make(sessions / "megatrain-1-abc", FolderKind.SESSION)
    forget_maker(held.path)  # as if in another container, where the pid is nobody's
    remove_left_sessions()
    assert held.path.exists()
    held.release()
    remove_left_sessions()
    assert not held.path.exists()


def test_one_that_a_process_still_uses_stays(sessions: Path) -> None:
    """Ray's daemons of a killed driver would make it again."""
    left = session(sessions / "megatrain-1-abc")
    daemon = subprocess.Popen([sys.executable, "-c", "input()", f"--session-dir={left}/ray"], stdin=subprocess.PIPE)
    remove_left_sessions()
    assert left.exists()
    daemon.communicate(b"\n")
    remove_left_sessions()
    assert not left.exists()


@pytest.fixture(scope="module")
def killed_driver() -> Iterator[tuple[Path, list[psutil.Process]]]:
    """Yield the session folder of a driver that was killed with Ray up, and Ray's processes."""
    before = set(session_folders())
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"up\n"
    [folder] = (path for path in session_folders() if path not in before and f"-{driver.pid}-" in path.name)
    processes = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.communicate()
    yield folder, processes
    for process in processes:
        if process.is_running():
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
def test_no_other_user_can_enter_a_session(killed_driver: tuple[Path, list[psutil.Process]]) -> None:
    """Ray opens its own folder to everybody: a link there would have it write through to files of its owner."""
    folder, _ = killed_driver
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["ray"]


@pytest.mark.ray
def test_a_killed_drivers_session_goes_once_rays_processes_have_ended(
    killed_driver: tuple[Path, list[psutil.Process]],
) -> None:
    """Only the session goes: a benchmark runs in a folder of its own beside it, and a user has one of such a name.

    The clusters that delete it start together, and end without ending other children of their drivers.
    """
    folder, processes = killed_driver
    with tempfile.TemporaryDirectory(prefix="megatrain-bench-", dir="/tmp") as bench:
        users = aged(Path(bench) / "run")
        remove_left_sessions()
        assert folder.exists(), "Ray's processes are still up"
        for process in processes:  # which end by themselves, Ray's agents within 70 s
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert psutil.wait_procs(processes, timeout=END_S)[1] == []
        starts = [subprocess.Popen([sys.executable, "-c", WITH_A_CHILD]) for _ in range(2)]
        assert [start.wait() for start in starts] == [0, 0]
        assert not folder.exists()
        assert (users / "file").read_text() == "precious"
    assert not [path for path in session_folders() if path.name.split("-")[1] in {str(start.pid) for start in starts}]


def test_a_daemon_that_goes_between_two_looks_is_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])

    class Watched(psutil.Process):
        def is_running(self) -> bool:
            running = super().is_running()
            child.kill()
            child.wait()
            return running

    assert not Daemons({Watched(child.pid): "raylet"}).alive


def test_a_process_one_of_whose_threads_is_left_lives() -> None:
    """Its first thread ends before the one that reads, and the kernel shows it as a zombie from then on."""
    code = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
        assert ray_daemons._lives(process)
        child.communicate(b"\n")
    assert not ray_daemons._lives(process)
