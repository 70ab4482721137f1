"""Implements `Ranks` with torch.distributed: NCCL between GPUs, gloo between CPU devices."""

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

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.errors import LostPeerError, MegatrainError

LOOPBACK = "127.0.0.1"
# Variables that the user has set override these. NCCL's multicast can put all GPUs of a host out of service where
# several tenants share its switches.
NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0"}
# Makes NCCL start operations of different groups on the device in the order of submission, which is the same in every
# process (LayerStreamer.sync_collective_order). Otherwise they may deadlock.
NCCL_DEFAULTS_TWO_GROUPS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
REACH_S = 120.0  # seconds within which an open port answers

# Newer versions of torch have these names, and warn when the older ones are used.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Rendezvous(NamedTuple):
    """Holds the address and port at which ranks meet."""

    address: str
    port: int


class Meeting:
    """Listens at a port of this process, at one address only, as long as the object is kept."""

    def __init__(self, address: str = LOOPBACK) -> None:
        """Open the port at an address of this host at which the other ranks reach it.

        Raises OSError if this host has no such address.
        """
        listening = socket.create_server((address, 0))
        self.place = Rendezvous(address, listening.getsockname()[1])
        self._store = TCPStore(*self.place, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if there is none."""
    if address.startswith("127."):
        return "lo"
    of_each = psutil.net_if_addrs().items()
    return next((name for name, found in of_each if address in (one.address for one in found)), None)


def _connections(interface: str | None) -> dict[str, str]:
    if interface is None:
        return {}
    # NCCL treats a name as a prefix unless it begins with "=". lo without it, as it was measured.
    of_nccl = interface if interface == "lo" else f"={interface}"
    return {"NCCL_SOCKET_IFNAME": of_nccl, "GLOO_SOCKET_IFNAME": interface}


def _reach(place: Rendezvous) -> TCPStore:
    try:
        return TCPStore(*place, is_master=False, timeout=timedelta(seconds=REACH_S))
    except RuntimeError as error:
        raise MegatrainError(
            f"GPU workers meet at {place.address}, port {place.port}, which this one did not reach within "
            f"{REACH_S:.0f} s: let hosts reach each other at all ports, at the addresses of their Ray nodes ({error})"
        ) from error


class RankGroup:
    """Connects this process, which has one device, with those of the other ranks. A process has at most one group."""

    def __init__(
        self, device: torch.device, place: Rendezvous, rank: int, size: int, timeout_s: float, address: str = LOOPBACK,
        *, gathers: bool = False,
    ) -> None:  # fmt: skip
        """Join the group and wait for the other ranks.

        timeout_s: seconds that the ranks may be apart when they make the same call.
        address: address of this host, whose network interface is used for the connections.
        gathers: whether `all_gather` will be called.

        Raises MegatrainError if the meeting cannot be reached, and LostPeerError if another rank does not come.
        """
        variables = NCCL_DEFAULTS | (NCCL_DEFAULTS_TWO_GROUPS if gathers else {}) | _connections(interface_of(address))
        for name, value in variables.items():
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
            # All-gathers that fill slots run concurrently with sums of gradients, so each needs a group of its own.
            self._gathering = dist.new_group(timeout=bound) if gathers else None

    def sum_part(self, flat: torch.Tensor, part: ElementRange) -> None:
        if part.size * self.size == flat.numel():
            own = flat[part.start : part.stop]
            self._exchange(lambda: _reduce_scatter(own, flat))
        else:  # the whole tensor is wanted, or the parts differ in size
            self.sum(flat)

    def sum(self, values: torch.Tensor) -> None:
        self._exchange(lambda: dist.all_reduce(values))

    def all_gather(self, flat: torch.Tensor, parts: Sequence[ElementRange]) -> None:
        flat = flat.data  # own version counter: autograd may be working on other slots of the same allocation
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
        """Turn a RuntimeError of a collective call into a LostPeerError that says what happened to this rank."""
        try:
            yield
        except torch.OutOfMemoryError:  # a RuntimeError, too
            raise
        except RuntimeError as error:
            raise LostPeerError(f"rank {self.rank} of {self.size} {what}: {error}") from error

    def close(self) -> None:
        """Leave the group. Idempotent. Calls that other ranks still wait for will not be answered."""
        if dist.is_initialized():
            dist.destroy_process_group()
