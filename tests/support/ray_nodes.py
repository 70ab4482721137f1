"""Starts a Ray cluster of several nodes on this machine: raylets at addresses of their own, each as good as a host."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ray.util import get_node_ip_address

from tests.support.ray_head import RAY, START_S, commands_under, end_family, free_ports

STARTED = "Ray runtime started"
COMMON = ("--block", "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={80 << 20}")
PORTS = ("--min-worker-port=0", "--max-worker-port=0")


@dataclass
class Nodes:
    """Holds the nodes of a cluster. `environment`: variables of their processes, and of whoever trains there."""

    folder: Path  # has Ray's temporary folder, and what nodes print
    environment: Mapping[str, str]
    address: str = ""
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start another node, and return when the cluster knows of it.

        `variables`: added to the environment of all nodes.
        """
        said = self.folder / f"node-{len(self._started)}.txt"
        with said.open("wb") as file:
            process = subprocess.Popen(
                [RAY, "start", *COMMON, *PORTS, *options], cwd="/", env={**self.environment, **variables},
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        deadline_s = time.monotonic() + START_S
        while STARTED not in said.read_text(errors="replace"):
            assert process.poll() is None and time.monotonic() < deadline_s, said.read_text(errors="replace")
            time.sleep(0.1)  # for the node, not for the test
        return process

    def join(self, address: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start another node at this address of the machine."""
        return self.start(f"--address={self.address}", f"--node-ip-address={address}", *options, **variables)

    def end(self) -> None:
        for process in reversed(self._started):
            end_family(process)


def actors_of(node: subprocess.Popen[bytes], kind: str) -> list[int]:
    """Return the pids of a node's processes whose actor is of this class."""
    return [pid for pid, words in commands_under(node.pid) if words and words[0].startswith(f"ray::{kind}")]


@contextmanager
def ray_nodes(*options: str, **of_head: str) -> Iterator[Nodes]:
    """Yield a cluster with a head, at the address by which Ray knows this machine, which asks for a token.

    Nothing of it is left afterwards.

    options: of `ray start` for the head.
    of_head: environment variables of the head.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",
    }
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))  # the paths of sockets must be short
    nodes = Nodes(folder, variables)
    (port,) = free_ports(1)
    try:
        head = "--head", f"--port={port}", f"--temp-dir={folder}/ray", "--include-dashboard=false"
        nodes.start(*head, *options, **of_head)
        nodes.address = f"{get_node_ip_address()}:{port}"
        yield nodes
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)
