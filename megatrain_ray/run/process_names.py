"""What the processes of a run are called, in messages and in its files."""

from __future__ import annotations

DATA, OWNER, GPU = "data", "arena owner", "GPU worker"


def gpu_name(rank: int) -> str:
    """The first one's is as that of a run with one GPU."""
    return f"{GPU} {rank}" if rank else GPU


def owner_name(host: int) -> str:
    """The first host's is as that of a run on one host."""
    return f"{OWNER} of host {host}" if host else OWNER


def shard_name(index: int) -> str:
    return f"optimizer shard {index}"
