"""Tensors that outlive a layer's work: which of them are copied."""

from __future__ import annotations

import torch

from megatrain_ray.engine.layer_calls.settle import settled


def test_only_memory_that_nothing_shares_is_copied() -> None:
    copied: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor.clone()

    given, own, both = torch.randn(3), torch.randn(4), torch.randn(2, 5)
    values = [own, given.view(3, 1), both[0], both[1], torch.randn(8)[:2], torch.arange(3), None, "text"]
    found = settled(values, [given, 7], copy)
    assert [tensor.data_ptr() for tensor in copied] == [own.data_ptr()]
    assert torch.equal(found[0], own) and found[0].data_ptr() != own.data_ptr()
    # shared with an argument, with one another, part of something larger, no number that a gradient flows to
    assert all(after is before for after, before in zip(found[1:], values[1:], strict=True))
