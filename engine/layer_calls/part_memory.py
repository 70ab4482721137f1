"""Releases or selects for offload the memory of divided blocks between their parts, during a step.

The trial forward determined which tensors may be offloaded or released after each part (discovery/block_parts.py).
Compute thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.model.structure import Part


@contextmanager
def collecting_saved(saved: list[torch.Tensor], before_read: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Append to `saved` each tensor that autograd saves in graphs built in the block.

    before_read: called with each saved tensor before a backward reads it.
    """

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        before_read(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, checked):
        yield


def inputs_to_offload(forward_pass: ForwardPass, part: Part) -> list[torch.Tensor]:
    """Return tensors that entered calls of the block and that its forward no longer reads after this part."""
    found = []
    for path, position in part.leaving:
        call = forward_pass.last_call(path)
        found += [port.tensor for port in call.ports if position in port.positions] if call else []
    return found


def release_spent(forward_pass: ForwardPass, part: Part) -> None:
    """Release the memory of call outputs that nothing reads after this part, for work that is submitted next."""
    for path, number in part.spent:
        call = forward_pass.last_call(path)
        storage = call.output_storage(number) if call else None
        if storage is not None:
            storage.resize_(0)


def glue_storages(saved: Sequence[torch.Tensor], forward_pass: ForwardPass, part: Part) -> list[torch.UntypedStorage]:
    """Return the storages of tensors `saved` by the block's own forward, between calls, that no call received."""
    calls = [call for call in forward_pass.calls if call.path.startswith(f"{part.block}.")]
    if forward_pass.pending is not None:
        calls.append(forward_pass.pending)
    arguments = (t for call in calls for t in call.arguments if isinstance(t, torch.Tensor))
    given = {tensor.untyped_storage()._cdata for tensor in arguments}
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    return [storage for key, storage in found.items() if key not in given]
