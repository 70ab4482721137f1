"""Runs one of several hosts with a rank each.

`python -m tests.support.rank_process ADDRESS PORT NUM_RANKS RANK` fills a slot from its own arena and from the others,
and fails if that holds anything else than the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.rank_group import RankGroup, Rendezvous
from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterGroup, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.weights_stream.layer_streamer import SlotGather

TIMEOUT_S = 60.0
FROZEN = ParameterGroup(trained=False)


def two_layers(trained: Sequence[int], frozen: Sequence[int] = ()) -> ModelLayout:
    """Return a model of two layers, each with parameters of these sizes."""
    specs = [ParameterSpec(f"t{k}", f"t{k}", (size,)) for k, size in enumerate(trained)]
    specs += [ParameterSpec(f"f{k}", f"f{k}", (size,), group=FROZEN) for k, size in enumerate(frozen)]
    layers = tuple(FlatLayout.build(f"layer {i}", specs) for i in range(2))
    return ModelLayout(layers, tuple(spec.name for spec in specs))


def check(ranks: RankGroup, frozen: Sequence[int]) -> None:
    layout = two_layers((1500, 64), frozen).on_host(ranks.rank, ranks.size)
    expected = torch.arange(layout.layers[1].size, dtype=torch.float32)
    slot = torch.full_like(expected, torch.nan)
    for span in RankParts(layout, ranks.rank, ranks.size).upload_spans(1):
        slot[span.start : span.stop] = expected[span.start : span.stop]
    device = CpuDevice()
    try:
        gather = SlotGather(layout, expected.itemsize, device, ranks, TIMEOUT_S)
        gather(1, slot.view(torch.uint8), device.record()).synchronize()
    finally:
        device.close()
    assert torch.equal(slot, expected)


def main(address: str, port: str, size: str, rank: str) -> None:
    ranks = RankGroup(
        torch.device("cpu"), Rendezvous(address, int(port)), int(rank), int(size), TIMEOUT_S, gathers=True
    )
    try:
        for frozen in ((), (1500,)):
            check(ranks, frozen)
    finally:
        ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
