"""Starts a real head of Ray by `ray start --head`, with its own ports and temporary folder; ends it by process id."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil

RAY = Path(sys.executable).with_name("ray")
START_S = 120.0
COMMAND_S = 240.0
PORTS = (
    "port", "dashboard-port", "ray-client-server-port", "node-manager-port", "object-manager-port",
    "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip


@dataclass(frozen=True)
class Head:
    """Talks to a running head. `environment`: variables of its processes, and of whoever talks to it."""

    url: str
    folder: Path  # Ray's temporary folder
    process: psutil.Process
    environment: Mapping[str, str]

    def job(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `ray job …` to its end."""
        at = arguments.index("--") if "--" in arguments else len(arguments)
        return subprocess.run(
            [RAY, "job", *arguments[:at], "--address", self.url, *arguments[at:]],
            capture_output=True, text=True, timeout=COMMAND_S, cwd="/", env={**self.environment, **environment},
        )  # fmt: skip

    def submit(self, *options: str, entrypoint: str) -> str:
        """Submit a job that runs on its own, and return its id."""
        job_id = f"job-{time.monotonic_ns()}"
        done = self.job("submit", "--no-wait", "--submission-id", job_id, *options, "--", "sh", "-c", entrypoint)
        assert done.returncode == 0, done.stdout + done.stderr
        return job_id

    def run(self, *options: str, entrypoint: str) -> subprocess.CompletedProcess[str]:
        """Run a job to its end; the output has its log."""
        return self.job("submit", *options, "--", "sh", "-c", entrypoint)

    def status(self, job_id: str) -> str:
        """Return what `ray job status` prints."""
        return self.job("status", job_id).stdout

    def logs(self, job_id: str, *, follow: bool = False) -> str:
        """Return the log of the job. `follow`: wait for the job's end."""
        return self.job("logs", job_id, *(["--follow"] if follow else [])).stdout


@contextmanager
def ray_head(**environment: str) -> Iterator[Head]:
    """Yield a head of Ray that listens on loopback only. Nothing of it is left afterwards.

    environment: variables in addition to those of this process.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",  # a job's python is the first one there
        **environment,
    }
    folder = tempfile.mkdtemp(prefix="head-", dir="/tmp")  # the paths of sockets must be short
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [
        RAY, "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=true",
        f"--object-store-memory={80 << 20}", f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0",
        *(f"--{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd="/", env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        await_answer(f"{url}/api/version", process)
        yield Head(url, Path(folder), psutil.Process(process.pid), variables)
    finally:
        end_family(process)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline_s, "the head did not start"
        try:
            urlopen(url, timeout=5).close()
        except HTTPError:  # it wants a token
            return
        except OSError:
            pass
        else:
            return
        time.sleep(0.1)  # for the head, not for the test


def commands_under(pid: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the process ids of a process's descendants, and what each was started with. One that ends is left out."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too, has no words
            yield process.pid, process.cmdline()


def end_family(process: subprocess.Popen[bytes] | psutil.Process) -> None:
    """Kill the process and its descendants by process id, at once: a head that is told to stop takes half a minute.

    Idempotent.
    """
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, timeout=30)
    process.wait()
