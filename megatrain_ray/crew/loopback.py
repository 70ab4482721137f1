"""Ray on 127.0.0.1 alone: what it starts there listens to this machine only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants, services

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0


@contextmanager
def on_loopback() -> Iterator[None]:
    """Ray's node in the block is 127.0.0.1, and its servers listen where their node is.

    On Linux Ray takes the machine's other address for 127.0.0.1 and then listens on all, unless it is told that a
    cluster has one machine (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0), which it reads as it is imported: so this is set
    where Ray keeps it. A Ray that keeps it elsewhere listens on all as before, behind its token.
    """
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def is_on_loopback(host: str, port: int) -> bool:
    """Whether a cluster that is called by a name of this machine listens on loopback only. One that listens on all has
    a node of another address, and Ray must look for that. Raises OSError where nobody listens."""
    _reach(host, port)
    if host not in ("localhost", LOOPBACK):
        return False
    try:
        _reach(services.get_node_ip_address(), port)
    except OSError:
        return True
    return bool(services.get_node_ip_address() == LOOPBACK)


def _reach(host: str, port: int) -> None:
    """Raises OSError where nobody listens."""
    socket.create_connection((host, port), CONNECT_S).close()
