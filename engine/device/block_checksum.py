"""What a block on disk is held to: the sum of its 64-bit words, whose ends are multiples of 8 bytes."""

from __future__ import annotations

import numpy as np

from megatrain_ray.io.storage.blob_store import Block


def host_checksum(block: Block) -> int:
    """Of memory of the host. It costs little (50 GB/s on one core of a small machine, the block in its caches), and
    what a disk does to a block, another block, an older one, zeros, flipped bits, changes it. A device can compute it,
    too (Device.checksum): the order of its words makes no difference."""
    assert isinstance(block, memoryview)
    return int(np.frombuffer(block, np.int64).sum())
