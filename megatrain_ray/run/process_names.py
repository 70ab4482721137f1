"""Names the processes of a run, in messages and in its files."""

from __future__ import annotations

DATA, OWNER, GPU, SHARD = "data", "arena owner", "GPU worker", "optimizer shard"


def gpu_name(rank: int) -> str:
    """Return the name of a GPU worker. Rank 0 has the same name as the only worker of a run with one GPU."""
    return f"{GPU} {rank}" if rank else GPU


def owner_name(host: int) -> str:
    """Return the name of a host's arena owner. On host 0 it is the same as in a run on one host."""
    return f"{OWNER} of host {host}" if host else OWNER


def shard_name(index: int) -> str:
    return f"{SHARD} {index}"
