"""Finds storages that only the autograd graph references, and that can therefore be offloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

# Smaller storages stay on the device: all of a model's together are a few megabytes, and each would cost a copy.
SMALL_BYTES = 4096


def owned_storages(saved: Sequence[torch.Tensor], most_bytes: int) -> list[torch.UntypedStorage]:
    """Return the storages that only the tensors in `saved` reference, largest first, as many as fit.

    This leaves out what entered the layer, what it returned, weights, buffers, and what a module put aside. It compares
    the storage's own reference count, so any view of it is noticed, wherever it is held.

    saved: tensors that nobody but the graph holds (WeightBindings.saving).
    most_bytes: limit for the sum of the returned storages.
    """
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    num_saved = Counter(tensor.untyped_storage()._cdata for tensor in saved)
    owned = []
    for key, storage in sorted(storages.items(), key=lambda item: -item[1].nbytes()):
        # The extra reference is `storage` itself.
        is_owned = torch._C._storage_Use_Count(key) == num_saved[key] + 1
        if is_owned and SMALL_BYTES <= storage.nbytes() <= most_bytes:
            owned.append(storage)
            most_bytes -= storage.nbytes()
    return owned
