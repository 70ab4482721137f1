"""Leaves out two of Ray's processes that a run of its own does not need: the autoscaler's monitor and the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private.node import Node

HELPERS = ("start_monitor", "start_api_server")


@contextmanager
def without_helpers() -> Iterator[None]:
    """Let the node that is started in the block have no monitor and no dashboard.

    Nothing scales such a node, and `include_dashboard=False` would still start a process that only collects statistics
    of usage, which are off, and `ray.init` would wait for it. Together they take 1.7 of 12 CPU seconds of a start. A
    version of Ray that starts them elsewhere starts them as before.
    """
    before = {name: vars(Node)[name] for name in HELPERS if name in vars(Node)}

    def nothing(node: Any, *arguments: Any, **options: Any) -> None:
        """Take the place of a method that starts a process."""

    for name in before:
        setattr(Node, name, nothing)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)
