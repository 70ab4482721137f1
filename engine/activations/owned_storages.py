"""Which memory of what autograd saved nobody else has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

# Smaller ones stay where they are: all that a model's layers have of them is a few megabytes, and each is a copy.
SMALL_BYTES = 4096


def owned_storages(saved: Sequence[torch.Tensor], most_bytes: int) -> list[torch.UntypedStorage]:
    """Those that nothing holds but these tensors, none of which is anybody else's (Residents.saving): not what entered
    the layer, what it returned, weights, buffers, or what a module put aside. The largest first, as many as fit
    `most_bytes`.

    By the storage's own count of references, so whoever holds a view of it is seen, wherever that is.
    """
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    num_saved = Counter(tensor.untyped_storage()._cdata for tensor in saved)
    owned = []
    for key, storage in sorted(storages.items(), key=lambda item: -item[1].nbytes()):
        # One reference is `storage` itself.
        is_owned = torch._C._storage_Use_Count(key) == num_saved[key] + 1
        if is_owned and SMALL_BYTES <= storage.nbytes() <= most_bytes:
            owned.append(storage)
            most_bytes -= storage.nbytes()
    return owned
