"""A sum that waited on the host ends where it waits for its update on the device: its last contribution moves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.gradients.gradient_offloader import LoadGradient, OffloadGradient
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.tiny import build_tiny

LAYER, SAME_REGION = 4, 1  # of six blocks, three regions in turn


@dataclass
class Bench:
    store: GradientStore
    layout: ModelLayout
    device: CpuDevice

    def gradients(self, layer: int) -> dict[str, torch.Tensor | None]:
        segments = self.layout.layers[layer].trained_segments
        return {segment.name: torch.randn(segment.shape) for segment in segments}

    def offload_first(self, layer: int, gradients: dict[str, torch.Tensor | None]) -> OffloadGradient:
        """Add the first of two contributions, and offload it to the host."""
        self.store.add(layer, gradients, last=False)
        offload = self.store.offload_partial(layer)
        offload.done.set_result(self.device.record())
        return offload

    def load(self, layer: int, on_host: torch.Tensor) -> LoadGradient:
        load = self.store.load_partial(layer)
        load.region.copy_(on_host.view(torch.uint8))
        load.done.set_result(self.device.record())
        return load

    def views(self, layer: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        segments = self.layout.layers[layer].trained_segments
        return {segment.name: self.layout.layers[layer].view(flat, segment.name) for segment in segments}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    source = folder_source(build_tiny(tmp_path, num_layers=6))
    mode = Mode(sums=Tier.HOST, hbm_layers=frozenset(range(8)))
    structure, plan = plan_for(source.factory, Recipe(1, micro_batch_size=2), mode, (4, 32))
    device, layout = CpuDevice(), structure.layout()
    store = GradientStore(plan, layout, device, poison=True)
    store.begin()
    yield Bench(store, layout, device)
    device.close()


def test_what_gets_no_gradient_at_last_keeps_its_sum(bench: Bench) -> None:
    first, last = bench.gradients(LAYER), bench.gradients(LAYER)
    without = next(iter(last))
    bench.load(LAYER, bench.offload_first(LAYER, first).flat.clone())
    bench.store.add(LAYER, {**last, without: None}, last=True)
    assert bench.store.finalize(LAYER) is None
    for name, total in bench.views(LAYER, bench.store.pop_deferred(LAYER)).items():
        before, value = first[name], last[name]
        assert before is not None
        assert value is not None
        assert torch.equal(total, before if name == without else before + value)


def test_the_region_is_free_behind_the_addition(bench: Bench) -> None:
    """What is loaded to it next waits for that event, not for the one of the copy that left before."""
    on_host = bench.offload_first(LAYER, bench.gradients(LAYER)).flat.clone()
    left = bench.offload_first(SAME_REGION, bench.gradients(SAME_REGION))
    assert bench.load(LAYER, on_host).after is left.done
    bench.store.add(LAYER, bench.gradients(LAYER), last=True)
    behind = bench.store.load_partial(SAME_REGION)
    assert behind.region.data_ptr() == left.flat.data_ptr()
    assert behind.after is not None
    assert behind.after is not left.done
    assert behind.after.done()
