"""What the processes of a run are called, in messages and in its files."""

from __future__ import annotations

DATA, OWNER, GPU = "data", "arena owner", "GPU worker"


def shard_name(index: int) -> str:
    return f"optimizer shard {index}"
