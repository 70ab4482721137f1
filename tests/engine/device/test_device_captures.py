"""The contract of Device.capture over every device that is here, and what only CUDA can refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.cuda_info import num_gpus
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import CaptureError
from megatrain_ray.virtual_clock import Timeline
from tests.engine.step.test_captured_step import CAPTURED, assert_equal
from tests.support.device_builders import MAKERS, Make
from tests.support.reference import Recipe
from tests.support.run_engine import train_engine
from tests.support.tiny import build_tiny, tiny_batches

needs_gpu = pytest.mark.skipif(not num_gpus(), reason="needs a GPU")


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture
def device(make: Make) -> Iterator[Device]:
    device = make(Timeline(), 1)
    with device.activate():
        yield device
    device.close()


def weighted(device: Device) -> tuple[torch.Tensor, torch.Tensor, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Weights, inputs and what computes a loss of them and its gradient, with autograd."""
    weights = torch.ones(64, device=device.torch_device, requires_grad=True)
    inputs = torch.ones(64, device=device.torch_device)

    def function() -> tuple[torch.Tensor, torch.Tensor]:
        loss = (weights * inputs).square().sum()
        return loss.detach(), torch.autograd.grad(loss, weights)[0]

    function()
    return weights, inputs, function


def test_a_replay_reads_what_is_there_then(device: Device) -> None:
    weights, inputs, function = weighted(device)
    capture = device.capture(function)
    for factor in (2.0, 3.0):
        inputs.copy_(device.upload(torch.full((64,), factor)))
        with torch.no_grad():
            weights.add_(1)
        capture.replay()
        loss, gradient = (output.cpu() for output in capture.outputs)
        weight = weights[0].item()
        assert loss == 64 * (weight * factor) ** 2
        assert (gradient == 2 * weight * factor**2).all()


@pytest.mark.spread(2)
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_captured_step_has_the_same_bits(tmp_path: Path, make: Make, order: LoopOrder, micro_batch_size: int) -> None:
    """A captured step has the same bits as one that is not captured.

    There are 128 supervised tokens: a GPU divides by a number that is no power of two by multiplying by its reciprocal,
    but by a tensor it divides.
    """
    build_tiny(tmp_path)
    recipe = Recipe(4, precision="bf16", micro_batch_size=micro_batch_size)
    batches = tiny_batches(4)
    assert {batch.num_supervised for batch in batches} == {128}
    ours, theirs = (
        train_engine(tmp_path, batches, recipe, replace(CAPTURED, order=order, captured=c), make_device=make)
        for c in (True, False)
    )
    assert_equal(ours, theirs)


@needs_gpu
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + torch.rand_like(x), "draws random numbers"),
        (lambda x: x + x.sum().item(), "captur"),
        (lambda x: x[x > 0], "captur"),
    ],
    ids=["random", "item", "mask"],
)
def test_cuda_refuses_what_a_replay_would_not_do_again(
    function: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    """The device goes on as if nothing had been tried: it draws, captures and computes."""
    device = CudaDevice()
    with device.activate():
        x = torch.ones(16, device=device.torch_device)
        function(x)
        with pytest.raises(CaptureError, match=reason):
            device.capture(lambda: (function(x),))
        device.seed(7)
        first = torch.rand(16, device=device.torch_device)
        device.seed(7)
        assert torch.equal(first, torch.rand(16, device=device.torch_device))
        _, inputs, other = weighted(device)
        capture = device.capture(other)
        inputs.fill_(2)
        capture.replay()
        assert capture.outputs[0].item() == 256
    device.close()


@needs_gpu
def test_cuda_gives_the_memory_of_a_capture_back() -> None:
    device = CudaDevice()
    with device.activate():
        x = torch.ones(1 << 20, device=device.torch_device)

        def function() -> tuple[torch.Tensor]:
            return (torch.cat([x] * 512).sum(),)  # 2 GiB

        function()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        capture = device.capture(function)
        assert torch.cuda.memory_reserved() >= before + (2 << 30)
        capture.replay()
        device.record().synchronize()
        capture.close()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + (64 << 20)
    device.close()
