"""Processes that outlived their driver: found by what cannot be mistaken, waited for, named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.run.run_processes import PROCESSES_NAME, await_end, forget, record


@contextmanager
def living() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that lives as long as the block."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of the first process that was written down, or of the place."""
    file = folder / PROCESSES_NAME
    values = json.loads(file.read_text())
    for key, value in changes.items():
        (values["place"] if key in values["place"] else values["processes"][0])[key] = value
    file.write_text(json.dumps(values))


def test_those_that_live_are_named_with_what_to_do(tmp_path: Path) -> None:
    with living() as shard, living() as gpu, living() as other:
        record(tmp_path, {"data": other.pid})
        record(tmp_path, {"optimizer shard 1": shard.pid, "GPU worker": gpu.pid})
        shard.send_signal(signal.SIGSTOP)  # for ever, unless somebody is told
        with pytest.raises(MegatrainError) as caught:
            await_end(tmp_path, 0.0)
        assert f"optimizer shard 1 (process {shard.pid}), GPU worker (process {gpu.pid});" in str(caught.value)
        assert f"(kill -9 {shard.pid} {gpu.pid}), then start again" in str(caught.value)
        assert str(other.pid) not in str(caught.value)
        gpu.kill()
        gpu.wait()
        with pytest.raises(MegatrainError, match=rf"after 0 s: optimizer shard 1 \(process {shard.pid}\); they hold"):
            await_end(tmp_path, 0.0)


def test_those_that_are_about_to_end_are_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with living() as process:
        record(tmp_path, {"data": process.pid})
        killer = threading.Timer(0.05, process.kill)
        killer.start()
        await_end(tmp_path, 60.0)  # and a zombie, which this one is until the block ends, holds nothing
        assert process.returncode is None
        killer.join()
    assert caplog.messages == [
        f"waiting up to 60 s for what an earlier start of this run left: data (process {process.pid})"
    ]
    await_end(tmp_path, 0.0)


def test_a_process_that_ended_before_it_could_be_written_down(tmp_path: Path) -> None:
    with living() as process:
        pass
    record(tmp_path, {"data": process.pid})
    assert json.loads((tmp_path / PROCESSES_NAME).read_text())["processes"] == []


@pytest.mark.parametrize(
    ("change", "logged"),
    [
        ({"start_ticks": 1}, None),  # the pid is another process's by now
        ({"boot_id": "before"}, "restart"),
        ({"pid_namespace": "pid:[1]"}, "another container"),
    ],
)
def test_the_same_pid_elsewhere_or_later_is_another_process(
    tmp_path: Path, change: dict[str, Any], logged: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    record(tmp_path, {"driver": os.getpid()})
    edit(tmp_path, **change)
    await_end(tmp_path, 0.0)
    assert [logged in message for message in caplog.messages if logged] == ([True] if logged else [])


def test_a_name_with_spaces_and_brackets(tmp_path: Path) -> None:
    """Ray's processes have such names; the kernel puts the name between the pid and everything else."""
    sleeper = tmp_path / "a) Z 1 (b"
    sleeper.symlink_to("/bin/sleep")
    process = subprocess.Popen([sleeper, "600"])
    try:
        record(tmp_path, {"data": process.pid})
        with pytest.raises(MegatrainError, match=f"process {process.pid}"):
            await_end(tmp_path, 0.0)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"place": {}, "processes": []}', "\x00" * 9])
def test_a_damaged_file_is_ignored_and_said_so(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / PROCESSES_NAME).write_text(text)
    await_end(tmp_path, 0.0)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / PROCESSES_NAME} cannot be read, so left processes are not looked for")


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    record(tmp_path, {"driver": os.getpid()})
    forget(tmp_path)
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []
    await_end(tmp_path, 0.0)


def test_a_directory_that_cannot_be_written_to() -> None:
    """The kernel refuses new files in /proc even to root."""
    with pytest.raises(MegatrainError, match=r"cannot write /proc/self/processes\.json: "):
        record(Path("/proc/self"), {"driver": os.getpid()})
