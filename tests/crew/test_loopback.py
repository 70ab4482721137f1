"""A run's own Ray listens to this machine only."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil
import pytest
import ray
from ray._private import ray_constants, services

from megatrain_ray.crew import ray_cluster
from megatrain_ray.crew.ray_patches import is_on_loopback, on_loopback
from megatrain_ray.errors import MegatrainError
from tests.support.ray_head import commands_under


def listening() -> dict[str, str]:
    """Return the process of the family that listens at each address and port."""
    found: dict[str, str] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # an idle worker of an earlier test has ended meanwhile
            ends = [end for end in process.net_connections() if end.status == psutil.CONN_LISTEN]
            found |= {f"{end.laddr.ip} {end.laddr.port}": process.name() for end in ends}
    return found


def test_nothing_listens_elsewhere(ray_address: str) -> None:
    found = listening()
    assert {"gcs_server", "raylet"} <= set(found.values())
    addresses = {ipaddress.ip_address(at.split()[0].removeprefix("::ffff:")) for at in found}
    assert all(address.is_loopback for address in addresses), found
    assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"


def test_helpers_that_no_run_needs_are_not_started(ray_address: str) -> None:
    commands = [" ".join(words) for _, words in commands_under(os.getpid())]
    assert any("log_monitor.py" in command for command in commands)
    assert not [c for c in commands if "_private/monitor.py" in c or "dashboard/dashboard.py" in c]


def test_a_cluster_elsewhere_is_looked_for_as_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on all addresses has another node's name than 127.0.0.1."""
    with socket.create_server(("", 0)) as on_all, socket.create_server(("127.0.0.1", 0)) as here:
        monkeypatch.setattr(services, "get_node_ip_address", lambda: "127.0.0.2")
        assert not is_on_loopback("127.0.0.1", on_all.getsockname()[1])
        assert is_on_loopback("127.0.0.1", here.getsockname()[1])
        assert is_on_loopback("localhost", here.getsockname()[1])
        assert not is_on_loopback("127.0.0.2", on_all.getsockname()[1])
    with pytest.raises(ConnectionRefusedError):
        is_on_loopback("127.0.0.1", 1)


def test_rays_own_setting_comes_back() -> None:
    before = ray_constants.ENABLE_RAY_CLUSTER
    with on_loopback():
        assert not ray_constants.ENABLE_RAY_CLUSTER
    assert before == ray_constants.ENABLE_RAY_CLUSTER


def test_the_last_cluster_of_this_machine_is_asked_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for eleven minutes to reach one that is gone."""
    monkeypatch.setattr(ray_cluster, "find_bootstrap_address", lambda folder: "127.0.0.1:1")
    with pytest.raises(
        MegatrainError, match=r"cannot connect to the Ray cluster auto \(127.0.0.1:1\): Connection refused"
    ):
        ray_cluster._connect("auto")
