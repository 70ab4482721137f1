"""The contract of a Device over every device that is here: CPU always, CUDA where there is one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.cuda_info import num_gpus
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.split_master import split
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.stochastic_rounding import rounding_counter
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.undo_log import ParamSlice
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from megatrain_ray.virtual_clock import Op, Stage, Timeline
from tests.support.device_builders import MAKERS, Make
from tests.support.expert_ranges import assert_same_but_norms
from tests.support.family_models import build_family, family_batches
from tests.support.reference import MuonRecipe, Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

pytestmark = pytest.mark.pairwise
# Of tests whose numbers others compare with plain PyTorch on the CPU (test_parity.py, test_muon.py, test_division.py).
FEW = pytest.mark.spread(2)


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture
def device(make: Make) -> Iterator[Device]:
    device = make(Timeline(), 1)
    yield device
    device.close()
    device.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, (3 << 20) + 1])
def test_copies_there_and_back(device: Device, num_bytes: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    region = device.allocate(num_bytes)
    there = device.copy(Stage.H2D, region, source, Op("load", 0), [])
    back = device.copy(Stage.D2H, target, region, Op("offload", 0), [there])
    back.synchronize()
    assert torch.equal(target, source)
    assert device.memory().reserved_bytes == num_bytes


def test_copies_may_cross_registered_ranges(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arenas are registered in pieces, and layers lie across their edges: CUDA refuses such a copy as one."""
    monkeypatch.setattr("megatrain_ray.engine.device.cuda_device.REGISTER_BYTES", 1 << 21)
    host = torch.frombuffer(bytearray(8 << 20), dtype=torch.uint8)
    host.copy_(torch.arange(host.numel()) % 251)
    device.pin(host)
    part = slice((1 << 20) + 4096, (7 << 20) + 512)
    region = device.allocate(part.stop - part.start)
    there = device.copy(Stage.H2D, region, host[part], Op("load", 0), [])
    back = torch.zeros(region.numel(), dtype=torch.uint8)
    device.copy(Stage.D2H, back, region, Op("offload", 0), [there]).synchronize()
    assert torch.equal(back, host[part])


def test_the_compute_stage_waits_for_arrivals(device: Device) -> None:
    source = torch.arange(1 << 20, dtype=torch.float32)
    region = device.allocate(source.nbytes).view(torch.float32)
    with device.activate():
        for scale in (1.0, 2.0):
            arrived = device.copy(Stage.H2D, region, source * scale, Op("load", 0), [device.record()])
            device.wait(arrived, "h2d")
            with device.compute(Op("forward", 0)):
                total = region.sum(dtype=torch.float64).item()
            assert total == scale * source.sum(dtype=torch.float64).item()
        exposed = device.take_exposed()
        # A GPU that had a copy before it was told to wait for it has not waited.
        assert "h2d" in exposed or (device.kind == "cuda" and not exposed)
        assert device.take_exposed() == {}


def test_copies_of_a_stage_keep_their_order(device: Device) -> None:
    region = device.allocate(8).view(torch.int64)
    events = [device.copy(Stage.H2D, region, torch.tensor([i]), Op("load", i), []) for i in range(50)]
    events[-1].synchronize()
    assert region.item() == 49


def test_the_virtual_clock_follows_the_dependencies(device: Device) -> None:
    buffers = [device.allocate(8) for _ in range(3)]
    host = torch.zeros(8, dtype=torch.uint8)
    first = device.copy(Stage.H2D, buffers[0], host, Op("load", 0), [])
    second = device.copy(Stage.H2D, buffers[1], host, Op("load", 1), [])
    back = device.copy(Stage.D2H, host, buffers[0], Op("offload", 0), [first])
    assert (first.at_s, second.at_s, back.at_s) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("activations", ActivationPolicy)
def test_the_event_log_is_the_same_on_every_device(
    tmp_path: Path, make: Make, order: LoopOrder, activations: ActivationPolicy
) -> None:
    build_tiny(tmp_path)
    mode = Mode(order, activations, num_fragments=3)
    logs = [
        train_engine(tmp_path, tiny_batches(2), Recipe(2), mode, make_device=maker).records
        for maker in (MAKERS["cpu"], make)
    ]
    # Which step an update is written down with is a matter of real time; when it runs on the virtual clock is not.
    ours, theirs = (sorted(map(str, map(dataclasses.astuple, itertools.chain(*log)))) for log in logs)
    assert ours == theirs


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ActivationPolicy)
def test_gradients_are_those_of_plain_autograd(
    tmp_path: Path, make: Make, precision: str, activations: ActivationPolicy
) -> None:
    """Both run on the same device, in the same mode: after one step m is the gradient times 1 - beta1."""
    build_tiny(tmp_path, tied=True)
    recipe = Recipe(1, precision=precision, micro_batch_size=2, clip=None)
    ours = train_engine(tmp_path, tiny_batches(1), recipe, Mode(LoopOrder.LAYERS_OUTER, activations), make_device=make)
    device = make(Timeline(), 1)
    with device.activate():
        theirs = train_reference(
            tmp_path, tiny_batches(1), dataclasses.replace(recipe, device=device.torch_device.type)
        )
    device.close()
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    for name, m in theirs.exp_avg.items():
        torch.testing.assert_close(ours.exp_avg[name], m.cpu(), rtol=1e-6, atol=1e-9, msg=name)


# BF16 products of one CPU and one GPU differ in their last bits, and ten updates of lr 1e-3 carry that on.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_agree_across_devices(tmp_path: Path, make: Make, precision: str) -> None:
    build_tiny(tmp_path)
    recipe = Recipe(10, precision=precision)
    ours = train_engine(tmp_path, tiny_batches(10), recipe, Mode(), make_device=make)
    theirs = train_reference(tmp_path, tiny_batches(10), recipe)
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE[precision])


def test_the_event_log_with_muon_is_the_same_on_every_device(tmp_path: Path, make: Make) -> None:
    """With clipping, all devices have the same log.

    Without clipping, momenta come by the same way as the weights, in the backward, and which of them come first is a
    matter of real time.
    """
    build_tiny(tmp_path)
    recipe, mode = Recipe(2, muon=MuonRecipe()), Mode(LoopOrder.LAYERS_OUTER, num_shards=2)
    logs = [
        train_engine(tmp_path, tiny_batches(2), recipe, mode, make_device=maker).records
        for maker in (MAKERS["cpu"], make)
    ]
    ours, theirs = (sorted(map(str, map(dataclasses.astuple, itertools.chain(*log)))) for log in logs)
    assert ours == theirs


# Of a momentum after three updates. Directions are made in bf16, where a last bit of a gradient is soon a large one: on
# an H200 2.2e-4 in fp32.
MUON_TOLERANCE = {"fp32": 2e-3, "bf16": 0.2}


@FEW
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_muon_is_that_of_the_same_device(
    tmp_path: Path, make: Make, precision: str, clip: float | None, grad_dtype: str
) -> None:
    """The engine agrees with the reference on the same device, in the same mode.

    Directions are made there, momenta and masters on the host. What a last bit of a gradient changes grows from update
    to update. So only three updates are compared, and not bit by bit.
    """
    build_tiny(tmp_path, num_layers=6)
    recipe = Recipe(3, muon=MuonRecipe(), precision=precision, clip=clip, grad_dtype=grad_dtype)
    mode = Mode(LoopOrder.LAYERS_OUTER, num_shards=2)
    ours = train_engine(tmp_path, tiny_batches(3), recipe, mode, make_device=make)
    device = make(Timeline(), 1)
    with device.activate():
        theirs = train_reference(
            tmp_path, tiny_batches(3), dataclasses.replace(recipe, device=device.torch_device.type)
        )
    device.close()
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE[precision])
    for name, m in theirs.exp_avg.items():
        assert (ours.exp_avg[name] - m.cpu()).norm() < MUON_TOLERANCE[precision] * m.norm().item(), name
    for name, master in theirs.masters.items():  # an update moves an element by 0.2 × lr or so
        assert (ours.masters[name] - master.cpu()).abs().mean() < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["moments", "narrow moments"])
def test_an_update_on_the_device_is_torchs_on_the_cpu(
    device: Device, moments: torch.dtype, is_split: bool, dtype: torch.dtype
) -> None:
    """An update is the same bit for bit in body, blocks and tail.

    There are three million elements and five. The last ones have random bits from counters that begin at 0 again.
    """
    hyper = AdamWConstants(0.9, 0.95, 1e-8, 0.1, moments_seed=5 if moments is torch.bfloat16 else None)
    weighting, size = ParamWeighting(0.7, 0.1), 3_000_005
    generator = torch.Generator().manual_seed(0)
    master, m, g = (torch.randn(size, generator=generator) * scale for scale in (1.0, 1e-3, 1e-2))
    v, gradient = (torch.rand(size, generator=generator) * 1e-5).to(moments), g.to(dtype)
    working, residual = split(master) if is_split else (master, None)
    here = AdamState(working, residual, m.to(moments), v)
    there = AdamState(*(None if t is None else t.to(device.torch_device, copy=True) for t in here))  # type: ignore[arg-type]
    params = UpdateParams(7, 7, 1e-3, 0.3)
    first = -2_999_000 - rounding_counter(5, 7, "w", 0)
    with closing(TorchBlocks(1, hyper)) as kernel:
        kernel.update([ParamSlice(here, 0, weighting, 0, "w", first)], gradient, params, None)
    with closing(device.open_update_kernel(hyper)) as kernel, device.activate():
        kernel.update([ParamSlice(there, 0, weighting, 0, "w", first)], gradient.to(device.torch_device), params, None)
        for name, mine, theirs in zip(AdamState._fields, there, here, strict=True):
            assert mine is theirs is None or torch.equal(mine.cpu(), theirs), name  # type: ignore[union-attr, arg-type]


@FEW
@pytest.mark.parametrize(("precision", "moments"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("hbm_layers", [frozenset({0, 2}), frozenset(range(5))], ids=["some", "all"])
def test_where_layers_live_changes_no_bit(
    tmp_path: Path, make: Make, hbm_layers: frozenset[int], clip: float | None, precision: str, moments: str
) -> None:
    build_tiny(tmp_path, tied=True)
    recipe = Recipe(3, precision=precision, moments=moments, micro_batch_size=2, clip=clip)
    ours, theirs = (
        train_engine(tmp_path, tiny_batches(3), recipe, Mode(hbm_layers=layers), make_device=make)
        for layers in (hbm_layers, frozenset())
    )
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg_sq[name], theirs.exp_avg_sq[name]), name


@FEW
@pytest.mark.parametrize("hbm_layers", [frozenset(), frozenset({0, 2})], ids=["none", "some"])
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_where_gradients_wait_changes_no_bit(
    tmp_path: Path, make: Make, micro_batch_size: int, order: LoopOrder, hbm_layers: frozenset[int]
) -> None:
    """In poison mode, a gradient that leaves beside the next forward keeps its memory until it has left."""
    build_tiny(tmp_path, num_layers=8)
    recipe = Recipe(3, precision="bf16", micro_batch_size=micro_batch_size)
    ours, theirs = (
        train_engine(
            tmp_path, tiny_batches(3), recipe, Mode(order, gradients=tier, hbm_layers=hbm_layers), make_device=make
        )
        for tier in (Tier.HBM, Tier.HOST)
    )
    assert ours.plan.deferred_offload_layers
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@FEW
@pytest.mark.parametrize("activations", ActivationPolicy)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_where_boundaries_wait_changes_no_bit(
    tmp_path: Path, make: Make, micro_batch_size: int, activations: ActivationPolicy
) -> None:
    """Their memory is somebody else's between forward and backward."""
    build_tiny(tmp_path, num_layers=8)
    recipe = Recipe(3, precision="bf16", micro_batch_size=micro_batch_size)
    ours, theirs = (
        train_engine(
            tmp_path, tiny_batches(3), recipe,
            Mode(LoopOrder.LAYERS_OUTER, activations, boundaries=tier, hbm_layers=frozenset({0, 2})),
            make_device=make,
        )
        for tier in (Tier.HOST, Tier.HBM)
    )  # fmt: skip
    assert ours.plan.host_boundary_bytes
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@FEW
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_staying", [0, 1])
def test_where_what_is_kept_waits_changes_no_bit(
    tmp_path: Path, make: Make, order: LoopOrder, precision: str, num_staying: int
) -> None:
    """Its memory is somebody else's between forward and backward; with dropout, whose masks are kept."""
    build_tiny(tmp_path, num_layers=8, attention_dropout=0.1)
    recipe = Recipe(3, precision=precision, micro_batch_size=2)
    ours, theirs = (
        train_engine(
            tmp_path, tiny_batches(3), recipe,
            Mode(order, boundaries=tier, kept=tier, num_staying=num_staying, hbm_layers=frozenset({0, 2})),
            make_device=make,
        )
        for tier in (Tier.HOST, Tier.HBM)
    )  # fmt: skip
    assert ours.count("kept") == 3 * 2 * 2 * (8 - num_staying)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@FEW
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST])
def test_dividing_blocks_changes_no_bit(
    tmp_path: Path, make: Make, tier: Tier, precision: str, order: LoopOrder
) -> None:
    """Blocks may be divided with all that their parts hand on, and save between them, on the device or on the host."""
    build_tiny(tmp_path)
    recipe = Recipe(3, precision=precision, micro_batch_size=2)
    ours, theirs = (
        train_engine(
            tmp_path, tiny_batches(3), recipe, Mode(order, boundaries=tier, kept=tier, block_parts=n), make_device=make
        )
        for n in (8, 1)
    )
    assert (ours.plan.compute.block_parts, theirs.plan.compute.block_parts) == (4, 1)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@FEW
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_dividing_experts_changes_no_bit(tmp_path: Path, make: Make, family: str, precision: str) -> None:
    """Only bits of the norm change, so nothing is clipped."""
    build_family(family, tmp_path)
    recipe = Recipe(3, precision=precision, micro_batch_size=2, clip=None)
    ours, theirs = (
        train_engine(tmp_path, family_batches(3), recipe, Mode(LoopOrder.LAYERS_OUTER, block_parts=n), make_device=make)
        for n in (8, 1)
    )
    assert ours.plan.compute.expert_groups > theirs.plan.compute.expert_groups
    assert_same_but_norms(ours, theirs)


@pytest.mark.parametrize("hbm_layers", [frozenset(), frozenset({0, 2, 9})], ids=["none", "some"])
def test_where_sums_wait_changes_no_bit(tmp_path: Path, make: Make, hbm_layers: frozenset[int]) -> None:
    """The engine is in poison mode; chunks of the loss add to the head's sum, wherever it is."""
    build_tiny(tmp_path, num_layers=8)
    recipe = Recipe(3, precision="bf16", micro_batch_size=1, loss_chunk_tokens=24)
    ours, theirs = (
        train_engine(tmp_path, tiny_batches(3), recipe, Mode(sums=tier, hbm_layers=hbm_layers), make_device=make)
        for tier in (Tier.HOST, Tier.HBM)
    )
    assert ours.count("fetch") == 3 * 3 * 10
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@pytest.mark.parametrize("shape", [(1, 1), (3, 8192), (1024, 1024), (1, (1 << 20) + 1), (1030, 1031)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_torchs(device: Device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    total, value = torch.randn(shape), torch.randn(shape).to(dtype)
    for turned, in_place in itertools.product((False, True), repeat=2):
        here, there = (t.to(device.torch_device, copy=True) for t in (total, value))
        out = here if in_place else torch.empty_like(here)
        with device.activate():
            device.add(*(t.T if turned else t for t in (here, there, out)))
            device.record().synchronize()
        assert torch.equal(out.cpu(), total + value)
        assert in_place or torch.equal(here.cpu(), total)


@pytest.mark.parametrize("shape", [(1, 1), (3, 8192), (1024, 1024), (1, (1 << 20) + 1), (1030, 1031)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_two_is_rounded_twice(device: Device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    total, first, second = torch.randn(shape), torch.randn(shape).to(dtype), (1e-3 * torch.randn(shape)).to(dtype)
    for summed, in_place in itertools.product((False, True), repeat=2):
        here, *values = (t.to(device.torch_device, copy=True) for t in (total, first, second))
        out = here if in_place else torch.empty_like(here)
        with device.activate():
            device.add_two(here if summed else None, *values, out)
            device.record().synchronize()
        assert torch.equal(out.cpu(), (total + first if summed else first.float()) + second)


@pytest.mark.skipif(not num_gpus(), reason="needs a GPU")
def test_cuda_takes_no_more_memory_than_it_may() -> None:
    """A device limited to 5 GiB beyond what earlier tests hold takes no more; 1 GiB of it is for the context.

    Memory that a tensor has left can be used for a larger one. The next device may take all memory.
    """
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    with closing(CudaDevice(memory_bytes=held + (5 << 30))) as device:
        for gib in (2, 3):
            torch.empty(gib << 30, dtype=torch.uint8, device=device.torch_device)
        assert torch.cuda.memory_reserved() <= held + (4 << 30)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(9 << 29, dtype=torch.uint8, device=device.torch_device)
    with closing(CudaDevice()) as device:
        torch.empty(9 << 29, dtype=torch.uint8, device=device.torch_device)


@pytest.mark.skipif(not num_gpus(), reason="needs a GPU")
def test_cuda_knows_what_is_free() -> None:
    with closing(CudaDevice()) as device:
        torch.cuda.empty_cache()  # or what earlier tests left is taken first
        before = device.free_bytes()
        taken = torch.empty(1 << 30, dtype=torch.uint8, device=device.torch_device)
        after = device.free_bytes()
        assert before is not None and after is not None
        assert before - after >= 0.99 * taken.nbytes  # the driver gives some of its own back at times


def test_cuda_is_refused_where_there_is_none() -> None:
    if not num_gpus():
        with pytest.raises(ConfigError, match="sees no GPU"):
            CudaDevice()
