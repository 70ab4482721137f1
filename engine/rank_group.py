"""RankGroup: ranks that meet through torch.distributed, NCCL between GPUs and gloo between CPU devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.errors import LostPeerError

LOOPBACK = "127.0.0.1"
# What NCCL and gloo connect by, and whether NCCL uses multicast, which can put all GPUs of a host out of service where
# several tenants share its switches; settings of the user come before these.
SURROUNDINGS = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}

# By the names of newer versions of torch, which warn of the others.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Meeting:
    """Where the ranks of one host find each other: a port that this process listens at, on loopback alone, as long as
    this object is kept."""

    def __init__(self) -> None:
        listening = socket.create_server((LOOPBACK, 0))
        self.port: int = listening.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class RankGroup:
    """One of several processes, each with a device of its own. One to a process."""

    def __init__(self, device: torch.device, port: int, rank: int, size: int, timeout_s: float) -> None:
        """Waits for the others. `port`: of the meeting. `timeout_s`: that the ranks may be apart in a call."""
        for name, value in SURROUNDINGS.items():
            os.environ.setdefault(name, value)
        self.rank = rank
        self.size = size
        bound = timedelta(seconds=timeout_s)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=TCPStore(LOOPBACK, port, is_master=False, timeout=bound),
            rank=rank,
            world_size=size,
            timeout=bound,
            device_id=device if on_gpu else None,
        )

    def sum_part(self, flat: torch.Tensor, part: Span) -> None:
        if part.size * self.size == flat.numel():
            own = flat[part.start : part.stop]
            self._exchange(lambda: _reduce_scatter(own, flat))
        else:  # the whole is asked for, or parts are not equally large
            self.sum(flat)

    def sum(self, values: torch.Tensor) -> None:
        self._exchange(lambda: dist.all_reduce(values))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        found = values.new_empty(self.size * values.numel())
        self._exchange(lambda: _all_gather(found, values))
        return found

    def _exchange(self, call: Callable[[], object]) -> None:
        try:
            with torch.no_grad():
                call()
        except torch.OutOfMemoryError:  # a RuntimeError, too
            raise
        except RuntimeError as error:
            raise LostPeerError(f"rank {self.rank} of {self.size} lost the others: {error}") from error

    def close(self) -> None:
        """Idempotent. What the others still wait for does not come."""
        if dist.is_initialized():
            dist.destroy_process_group()
