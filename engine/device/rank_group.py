"""RankGroup: ranks that meet through torch.distributed, NCCL between GPUs and gloo between CPU devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.errors import LostPeerError, MegatrainError

LOOPBACK = "127.0.0.1"
# Settings of the user come before these. NCCL's multicast can put all GPUs of a host out of service where several
# tenants share its switches.
SURROUNDINGS = {"NCCL_NVLS_ENABLE": "0"}
# Its operations of different groups begin on the device in the order in which they were submitted, as in every process
# (LayerStreamer.await_submitted): else they may wait for each other for good.
OF_TWO_GROUPS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
REACH_S = 120.0  # in which a port that is open answers

# By the names of newer versions of torch, which warn of the others.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Place(NamedTuple):
    """Where ranks find each other."""

    address: str
    port: int


class Meeting:
    """A port that this process listens at, at one address alone, as long as this object is kept."""

    def __init__(self, address: str = LOOPBACK) -> None:
        """`address`: of this host, at which the others reach it. Raises OSError where it is none of this host's."""
        listening = socket.create_server((address, 0))
        self.place = Place(address, listening.getsockname()[1])
        self._store = TCPStore(*self.place, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address; None where there is none."""
    if address.startswith("127."):
        return "lo"
    of_each = psutil.net_if_addrs().items()
    return next((name for name, found in of_each if address in (one.address for one in found)), None)


def _connections(interface: str | None) -> dict[str, str]:
    """What NCCL and gloo connect by. NCCL takes names for beginnings of names, unless it is told that they are not."""
    if interface is None:
        return {}
    of_nccl = interface if interface == "lo" else f"={interface}"  # lo as it was measured
    return {"NCCL_SOCKET_IFNAME": of_nccl, "GLOO_SOCKET_IFNAME": interface}


def _reach(place: Place) -> TCPStore:
    try:
        return TCPStore(*place, is_master=False, timeout=timedelta(seconds=REACH_S))
    except RuntimeError as error:
        raise MegatrainError(
            f"GPU workers meet at {place.address}, port {place.port}, which this one did not reach within "
            f"{REACH_S:.0f} s: let hosts reach each other at all ports, at the addresses of their Ray nodes ({error})"
        ) from error


class RankGroup:
    """One of several processes, each with a device of its own. One to a process."""

    def __init__(
        self, device: torch.device, place: Place, rank: int, size: int, timeout_s: float, address: str = LOOPBACK,
        *, gathers: bool = False,
    ) -> None:  # fmt: skip
        """Waits for the others. `place`: of the meeting. `timeout_s`: that the ranks may be apart in a call. `address`:
        of this host, by whose interface it is connected. `gathers`: whether `all_gather` will be called.

        Raises MegatrainError where the place cannot be reached, LostPeerError where another rank
        fails or does not come within `timeout_s`.
        """
        surroundings = SURROUNDINGS | (OF_TWO_GROUPS if gathers else {}) | _connections(interface_of(address))
        for name, value in surroundings.items():
            os.environ.setdefault(name, value)
        self.rank = rank
        self.size = size
        bound = timedelta(seconds=timeout_s)
        on_gpu = device.type == "cuda"
        store = _reach(place)
        store.set_timeout(bound)
        with self._losses_named("did not meet the others"):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=bound,
                device_id=device if on_gpu else None,
            )
            # What fills slots runs beside what sums gradients: each has an order of its own.
            self._gathering = dist.new_group(timeout=bound) if gathers else None

    def sum_part(self, flat: torch.Tensor, part: Span) -> None:
        if part.size * self.size == flat.numel():
            own = flat[part.start : part.stop]
            self._exchange(lambda: _reduce_scatter(own, flat))
        else:  # the whole is asked for, or parts are not equally large
            self.sum(flat)

    def sum(self, values: torch.Tensor) -> None:
        self._exchange(lambda: dist.all_reduce(values))

    def all_gather(self, flat: torch.Tensor, parts: Sequence[Span]) -> None:
        flat = flat.data  # as copies into slots do: autograd is at work on others of the same memory
        own = flat[slice(*parts[self.rank])]
        first, last = parts[0], parts[-1]
        if all(part.size == own.numel() for part in parts):
            self._exchange(lambda: _all_gather(flat[first.start : last.stop], own, group=self._gathering))
            return
        for rank, part in enumerate(parts):
            if part.size:
                values = flat[slice(*part)]
                self._exchange(partial(dist.broadcast, values, rank, group=self._gathering))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        found = values.new_empty(self.size * values.numel())
        self._exchange(lambda: _all_gather(found, values))
        return found

    def _exchange(self, call: Callable[[], object]) -> None:
        with self._losses_named("lost the others"), torch.no_grad():
            call()

    @contextmanager
    def _losses_named(self, what: str) -> Iterator[None]:
        """A RuntimeError of a call of all ranks, whatever torch's reason, becomes a LostPeerError that names this rank;
        running out of memory stays what it is. `what`: this rank did."""
        try:
            yield
        except torch.OutOfMemoryError:  # a RuntimeError, too
            raise
        except RuntimeError as error:
            raise LostPeerError(f"rank {self.rank} of {self.size} {what}: {error}") from error

    def close(self) -> None:
        """Idempotent. What the others still wait for does not come."""
        if dist.is_initialized():
            dist.destroy_process_group()
