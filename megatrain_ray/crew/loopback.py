"""Keeps Ray on 127.0.0.1, so that its servers listen to this machine only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants, services

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0


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
