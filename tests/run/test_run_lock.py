"""A run directory is locked while it is in use, by the kernel: nothing that a dead process leaves is in the way."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain_ray.run.run_lock import hold_lock
from tests.support.run_folders import begin, in_folder, refusal


def lock_elsewhere(folder: Path, then: str) -> subprocess.CompletedProcess[str]:
    """Hold the lock and run a statement in another process."""
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom megatrain_ray.run.run_lock import hold_lock\n"
        f"with hold_lock(Path({str(folder)!r})): {then}"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_second_process_is_refused_and_told_the_holder(tmp_path: Path) -> None:
    with hold_lock(tmp_path):
        other = lock_elsewhere(tmp_path, "pass")
    assert f"ConfigError: run_dir: {tmp_path} is in use by process {os.getpid()} on {platform.node()}; " in other.stderr


def test_a_killed_holder_does_not_block_the_next_run(tmp_path: Path) -> None:
    assert lock_elsewhere(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    begin(tmp_path)


def test_a_lock_file_that_was_removed_meanwhile_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our flock the holder ends its run and removes the file: a third process could lock anew."""
    flock, calls = fcntl.flock, []

    def remove_first(file: int, operation: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / "lock").unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with hold_lock(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} on {platform.node()}\n"


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS without its lock service says so only when asked for a lock."""

    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    message = refusal(in_folder(tmp_path / "run"))
    assert message == (
        f"run_dir: cannot write to {tmp_path / 'run'}: No locks available; choose a folder that can be written to and "
        "locked"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/new/run", "/proc/self"])
def test_a_folder_that_cannot_be_written_to(folder: str) -> None:
    """The kernel refuses new files in /proc even to root."""
    message = refusal(in_folder(Path(folder)))
    assert message.startswith(f"run_dir: cannot write to {folder}: ")
    assert message.endswith("; choose a folder that can be written to and locked")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert refusal(in_folder(tmp_path / "run")).startswith(f"run_dir: cannot write to {tmp_path / 'run'}: File exists")
    assert refusal(in_folder(tmp_path / "run" / "x")).startswith("run_dir: cannot write to ")
