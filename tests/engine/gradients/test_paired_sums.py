"""With layers outermost a block's gradients are added to its sum two at a time, with the bits of one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.tiny import build_tiny

Gradients = dict[str, torch.Tensor | None]


class CountingDevice(CpuDevice):
    num_pairs = 0

    def add_two(self, total: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        self.num_pairs += 1
        super().add_two(total, first, second, out)


def planned(
    folder: Path, order: LoopOrder, num_micro_batches: int
) -> tuple[Plan, ModelLayout, GradientStore, CountingDevice]:
    source, device = folder_source(build_tiny(folder)), CountingDevice()
    structure, plan = plan_for(source.factory, Recipe(1, micro_batch_size=1), Mode(order), (num_micro_batches, 32))
    store = GradientStore(plan, structure.layout(), device, poison=True)
    store.begin()
    return plan, structure.layout(), store, device


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 5])
def test_bits_of_a_sum_of_one_after_the_other(tmp_path: Path, num_micro_batches: int) -> None:
    """One parameter has no gradient of every second micro-batch, another never has one."""
    plan, layout, store, device = planned(tmp_path, LoopOrder.LAYERS_OUTER, num_micro_batches)
    assert [*plan.paired_layers] == ([1, 2, 3] if num_micro_batches > 1 else [])
    for layer in (3, 2):
        shapes = {segment.name: segment.shape for segment in layout.layers[layer].trained_segments}
        rarely, never, *_ = shapes
        expected = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for j in range(num_micro_batches):
            given: Gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
            given |= {never: None} | ({rarely: None} if j % 2 else {})
            for name, gradient in given.items():
                if gradient is not None:
                    expected[name] = gradient.clone() if j == 0 else expected[name] + gradient
            store.add(layer, given, last=j == num_micro_batches - 1)
        departure = store.finalize(layer)
        assert departure is not None
        for name, view in layout.layers[layer].trained_views(departure.flat).items():
            assert torch.equal(view, expected[name]), name
        departure.done.set_result(device.record())
        assert device.num_pairs == num_micro_batches // 2 * (len(shapes) - 2) * (4 - layer)
    device.close()


def test_no_gradient_waits_where_another_layer_comes_next(tmp_path: Path) -> None:
    plan, layout, store, device = planned(tmp_path, LoopOrder.MICRO_BATCHES_OUTER, 4)
    assert not plan.paired_layers
    gradients: Gradients = {s.name: torch.ones(s.shape) for s in layout.layers[2].trained_segments}
    store.add(2, gradients, last=False)
    departure = store.offload_partial(2)
    assert all((view == 1).all() for view in layout.layers[2].trained_views(departure.flat).values())
    device.close()
