"""Changes how Ray starts and ends a node: on 127.0.0.1 only, without processes and waits that a run does not need."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.node import Node
from ray.job_config import JobConfig

HELPERS = ("start_monitor", "start_api_server")
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0


@contextmanager
def without_helpers() -> Iterator[None]:
    """Let the node that is started in the block have no monitor of the autoscaler and no dashboard.

    Nothing scales such a node, and `include_dashboard=False` would still start a process that only collects statistics
    of usage, which are off, and `ray.init` would wait for it. Together they take 1.7 of 12 CPU seconds of a start. A
    version of Ray that starts them elsewhere starts them as before.
    """
    with _calling_instead(lambda: None, *HELPERS):
        yield


@contextmanager
def ended_by(end: Callable[[], None]) -> Iterator[None]:
    """Let `ray.shutdown` in the block call `end` to end the processes of a node that this process has started.

    It calls it when this process has disconnected. Ray would give the raylet and then the gcs_server a second each to
    end by themselves, which takes them longer, and kill them. The others would notice a second later.
    """
    with _calling_instead(end, "kill_all_processes"):
        yield


@contextmanager
def _calling_instead(function: Callable[[], None], *names: str) -> Iterator[None]:
    """Call `function` in the block in place of those methods of Ray's nodes, as far as this version has them."""
    before = {name: vars(Node)[name] for name in names if name in vars(Node)}

    def call(node: Any, *arguments: Any, **options: Any) -> None:
        function()

    for name in before:
        setattr(Node, name, call)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


class DriverPaths(JobConfig):  # type: ignore[misc]
    """Configures a job whose workers import only from where this process does.

    `ray.init` lets workers import from the current directory before all else, where a user's file may be called like a
    module of Python or of a library.
    """

    _py_driver_sys_path: list[str]

    def _serialize(self) -> bytes:
        ours = [str(Path.cwd()) if path == "" else path for path in sys.path]
        self._py_driver_sys_path[:] = [path for path in self._py_driver_sys_path if path in ours]
        serialized: bytes = super()._serialize()
        return serialized


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make 127.0.0.1 the address of the Ray node that is started or joined in the block. Its servers listen only there.

    On Linux Ray replaces 127.0.0.1 by the machine's other address, and then listens on all addresses. It does not if
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 says that the cluster has one machine. Ray reads that variable when it is
    imported, so this sets the constant in which Ray keeps the value. A version of Ray that keeps it elsewhere listens
    on all addresses as before, protected by its token.
    """
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def is_on_loopback(host: str, port: int) -> bool:
    """Return whether the cluster at this address listens on the loopback address only.

    host: any other name than localhost or 127.0.0.1 gives False.

    A cluster that listens on all addresses has a node with another address, and Ray must look for that. Raises OSError
    if nobody listens.
    """
    _connect(host, port)
    if host not in ("localhost", LOOPBACK):
        return False
    own_address = services.get_node_ip_address()
    try:
        _connect(own_address, port)
    except OSError:
        return True
    return bool(own_address == LOOPBACK)


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), CONNECT_S).close()
