"""Gradients may wait on the device until their update is known.

Bits are the same, the slab is small, and the next forward does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import MegatrainError
from megatrain_ray.virtual_clock import Op, Stage
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

pytestmark = pytest.mark.pairwise

STEPS, BLOCKS = 3, 8
SOME = frozenset({0, 2})
MODES = {
    "one micro-batch": (Mode(gradients=Tier.HBM, num_shards=2), 4),
    "several": (Mode(gradients=Tier.HBM, num_block_slots=3), 2),
    "layers outer": (Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, gradients=Tier.HBM), 2),
}


def train(folder: Path, mode: Mode, micro_batch_size: int, precision: str = "bf16") -> EngineResult:
    """Train with the engine, and assert that plain PyTorch gives the same bits."""
    build_tiny(folder, tied=precision == "fp32", num_layers=BLOCKS)
    recipe = Recipe(STEPS, precision=precision, micro_batch_size=micro_batch_size)
    held_out = tiny_batches(1)
    ours = train_engine(folder, tiny_batches(STEPS), recipe, mode, held_out=held_out)
    theirs = train_reference(folder, tiny_batches(STEPS), recipe)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg_sq[name], theirs.exp_avg_sq[name]), name
    return ours


def on_host(plan: Plan) -> list[int]:
    return [i for i in range(len(plan.layers)) if i not in plan.hbm_layers]


@pytest.mark.spread(4)
@pytest.mark.parametrize("hbm_layers", [frozenset(), SOME], ids=["none in HBM", "some in HBM"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODES)
def test_same_bits(tmp_path: Path, name: str, precision: str, hbm_layers: frozenset[int]) -> None:
    mode, micro_batch_size = MODES[name]
    ours = train(tmp_path, replace(mode, hbm_layers=hbm_layers), micro_batch_size, precision)
    assert ours.plan.deferred_offload_layers == tuple(on_host(ours.plan))
    assert ours.plan.slots.gradient_bytes == ()
    waiting = sum(ours.plan.layers[i].num_trained for i in ours.plan.deferred_offload_layers)
    assert ours.plan.gradients.slab_bytes < waiting * ours.plan.gradients.slab_itemsize
    left = [r.op.layer for r in ours.records[0] if r.op.name == "offload"]
    assert left == sorted(left)


def test_the_next_forward_does_not_wait_until_they_have_left(tmp_path: Path) -> None:
    """The gradient of the last layer leaves when the first layers of the next forward have been computed."""
    mode = Mode(gradients=Tier.HBM, num_block_slots=3)
    build_tiny(tmp_path, num_layers=BLOCKS)

    def cost(stage: Stage, op: Op) -> float:
        return 3.0 if stage is Stage.OPTIMIZER else 1.0

    recipe = Recipe(STEPS, precision="bf16", micro_batch_size=4)
    result = train_engine(tmp_path, tiny_batches(STEPS), recipe, mode, cost=cost)
    records = [record for of_step in result.records for record in of_step]
    head = BLOCKS + 1
    left = [r.start_s for r in records if r.op.name == "offload" and r.op.layer == head]
    begun = [r.start_s for r in records if r.op.name == "forward" and r.op.layer == 0]
    assert all(left_s > begun_s for left_s, begun_s in zip(left, begun[1:], strict=False))


@pytest.mark.parametrize("steps", [2, 1], ids=["a step follows", "the last step"])
def test_one_that_cannot_leave_ends_what_comes_next(tmp_path: Path, steps: int) -> None:
    """Not the deadline of the update that waits for it."""

    class Broken(CpuDevice):
        def copy(self, stage: Stage, target: Tensor, source: Tensor, op: Op, after: Sequence[Event]) -> Event:
            if op.name == "offload" and op.layer == 6:
                raise MegatrainError("the bus is broken")
            return super().copy(stage, target, source, op, after)

    build_tiny(tmp_path, num_layers=BLOCKS)
    recipe, mode = Recipe(steps, precision="bf16", micro_batch_size=4), Mode(gradients=Tier.HBM)
    with pytest.raises(MegatrainError, match="the bus is broken"):
        train_engine(
            tmp_path, tiny_batches(steps), recipe, mode, make_device=lambda timeline, threads: Broken(timeline, threads)
        )


@pytest.mark.parametrize("name", MODES)
def test_they_are_allocated_where_inputs_settle(tmp_path: Path, name: str) -> None:
    """They outlive a layer's work, too, and take the place that inputs leave (Plan.settles)."""
    sizes: list[int] = []

    class Recording(CpuDevice):
        @contextmanager
        def settling(self) -> Iterator[None]:
            with _Sizes(sizes):
                yield

    mode, micro_batch_size = MODES[name]
    build_tiny(tmp_path, num_layers=BLOCKS)
    recipe = Recipe(1, precision="bf16", micro_batch_size=micro_batch_size)
    result = train_engine(
        tmp_path, tiny_batches(1), recipe, mode, make_device=lambda timeline, threads: Recording(timeline, threads)
    )
    plan = result.plan
    assert plan.gradients_on_device and plan.settles == (name == "layers outer")
    assert len(sizes) == (len(plan.gradients_on_device) if plan.settles else 0)


class _Sizes(TorchFunctionMode):
    """Notes the bytes of each region that is allocated without a value."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            self._sizes.append(args[0])
        return func(*args, **kwargs or {})
