"""Leaves out what Ray adds to a run and the run does not need: two processes, waits, and a folder to import from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray.job_config import JobConfig

HELPERS = ("start_monitor", "start_api_server")


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
