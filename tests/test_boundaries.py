"""What enters layers leaves the device and comes back: memory, order, and who may not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_ray import trace
from megatrain_ray.engine.boundaries import BoundaryStore
from megatrain_ray.engine.cpu_device import CpuDevice
from megatrain_ray.engine.device import Event
from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.engine.structure import discover
from megatrain_ray.engine.visits import LoopOrder, visits
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Op
from tests.own_code import CODE, build_own_code
from tests.reference import Recipe
from tests.run_engine import Mode, folder_source, train_engine
from tests.tiny import build_tiny, tiny_batches

NUM_LAYERS, NUM_BYTES = 4, 64  # embedding, two blocks, head
BLOCKS = (1, 2)


@dataclass
class Stage:
    """A store, and a device to run it on."""

    store: BoundaryStore
    device: CpuDevice

    def begin(self, num_micro_batches: int = 2) -> None:
        self.store.begin(visits(NUM_LAYERS, num_micro_batches, LoopOrder.LAYERS_OUTER))


@pytest.fixture
def stage() -> Iterator[Stage]:
    layers = [SimpleNamespace(boundary=Tier.HOST if i in BLOCKS else Tier.HBM) for i in range(NUM_LAYERS)]
    device = CpuDevice()
    plan = SimpleNamespace(layers=layers, boundary_bytes=2 * len(BLOCKS) * NUM_BYTES)
    yield Stage(BoundaryStore(cast(Plan, plan), device), device)
    device.close()


def entering(value: float) -> torch.Tensor:
    return torch.full((NUM_BYTES // 4,), value)


def held(tensors: dict[Any, torch.Tensor]) -> set[Any]:
    """Whose memory is there."""
    return {key for key, tensor in tensors.items() if tensor.untyped_storage().nbytes()}


def test_memory_goes_one_forward_later_and_comes_one_backward_ahead(stage: Stage) -> None:
    tensors = {(layer, j): entering(float(10 * layer + j)) for layer in BLOCKS for j in (0, 1)}
    seen = []
    stage.begin()
    for (layer, j), tensor in tensors.items():
        stage.store.leave(layer, j, [tensor])
        seen.append(held(tensors) - {key for key in tensors if key > (layer, j)})
    assert seen == [{(1, 0)}, {(1, 1)}, {(2, 0)}, {(2, 1)}]
    for entry, there in (
        ((2, 0), {(2, 0), (2, 1)}),
        ((2, 1), {(2, 0), (2, 1), (1, 0)}),
        ((1, 0), {(2, 0), (2, 1), (1, 0), (1, 1)}),
        ((1, 1), {(2, 0), (2, 1), (1, 0), (1, 1)}),
    ):
        stage.store.bring_back(*entry)
        assert held(tensors) == there
        assert torch.equal(tensors[entry], entering(float(10 * entry[0] + entry[1])))
        stage.store.forget(*entry)


def test_who_shares_memory_has_it_back(stage: Stage) -> None:
    """The leaf that collects gradients and what autograd saved are other tensors of the same memory."""
    tensor = entering(3.0)
    alias, half = tensor.detach(), tensor[: NUM_BYTES // 8]
    stage.begin(1)
    stage.store.leave(1, 0, [tensor, half])
    stage.store.leave(2, 0, [entering(4.0)])
    assert alias.untyped_storage().nbytes() == 0
    stage.store.bring_back(2, 0)
    stage.store.bring_back(1, 0)
    assert torch.equal(alias, entering(3.0))
    assert torch.equal(half, entering(3.0)[: NUM_BYTES // 8])


def test_memory_is_filled_behind_all_that_was_submitted_before(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it may be somebody else's, of whom the transfer's stage knows nothing."""
    recorded: list[Event] = []
    record, copy = stage.device.record, stage.device.copy
    behind: list[bool] = []

    def note() -> Event:
        recorded.append(record())
        return recorded[-1]

    def watch(kind: trace.Stage, target: torch.Tensor, source: torch.Tensor, op: Op, after: Sequence[Event]) -> Event:
        if kind is trace.Stage.H2D:
            behind.append(any(event is recorded[-1] for event in after))
        return copy(kind, target, source, op, after)

    tensors = [entering(float(layer)) for layer in BLOCKS]
    stage.begin(1)
    for layer, tensor in zip(BLOCKS, tensors, strict=True):
        stage.store.leave(layer, 0, [tensor])
    monkeypatch.setattr(stage.device, "record", note)
    monkeypatch.setattr(stage.device, "copy", watch)
    stage.store.bring_back(2, 0)
    assert len(recorded) == 2
    assert behind == [True, True]


def test_layers_whose_inputs_stay_keep_them(stage: Stage) -> None:
    tensor = entering(1.0)
    stage.begin(1)
    stage.store.leave(0, 0, [tensor])
    stage.store.leave(3, 0, [tensor])
    stage.store.bring_back(3, 0)
    assert tensor.untyped_storage().nbytes() == NUM_BYTES
    assert stage.device.timeline.records == ()


def test_more_than_the_plan_has_room_for_is_an_error(stage: Stage) -> None:
    stage.begin(1)
    with pytest.raises(MegatrainError, match="take 320 bytes of host memory, the plan has 256"):
        stage.store.leave(1, 0, [torch.zeros(80)])


class Skipping(LlamaForCausalLM):
    """Adds what entered its second layer to what leaves the last one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.norm = WithMemory(self.model.norm)
        self.model.layers[1].register_forward_pre_hook(self.model.norm.remember)


class WithMemory(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def remember(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.__dict__["seen"] = args[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(hidden + self.__dict__["seen"])
        return found


@pytest.mark.parametrize(("kind", "expected"), [(LlamaForCausalLM, [True] * 3), (Skipping, [True, False, True])])
def test_inputs_that_somebody_reads_later_stay(kind: type[LlamaForCausalLM], expected: list[bool]) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    _, activations = discover(lambda dtype: kind._from_config(config, dtype=dtype), torch.float32, 1, 8)
    assert activations.private == (False, *expected, False)


LOOP = """        for layer in self.layers:
            hidden = layer(hidden)
"""
HANDS_ON_A_MASK = CODE.replace("forward(self, hidden)", "forward(self, hidden, mask)").replace(
    "* self.scale", "* self.scale, mask"
).replace(LOOP, """        mask = torch.ones_like(hidden)
        for layer in self.layers:
            hidden, mask = layer(hidden * mask, mask)
""")  # fmt: skip
TAKES_A_WEIGHT = CODE.replace("class MixerBase", """class Start(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self):
        return self.weight[:]


class MixerBase""").replace("forward(self, hidden)", "forward(self, hidden, start=0.0)").replace(
    "self.norm(hidden +", "self.norm(hidden + start +"
).replace("        self.layers =", "        self.start = Start(config.hidden_size)\n        self.layers =").replace(
    LOOP, """        start = self.start()
        for layer in self.layers:
            hidden, start = layer(hidden, start), 0.0
""")  # fmt: skip
RETURNS_INPUTS = CODE.replace(LOOP, """        seen = []
        for layer in self.layers[:2]:
            seen.append(hidden)
            hidden = layer(hidden)
        hidden = self.layers[2](hidden)
""").replace("last_hidden_state=hidden)", "last_hidden_state=hidden, hidden_states=tuple(seen))")  # fmt: skip

IGNORES_AN_ARGUMENT = CODE.replace("forward(self, hidden)", "forward(self, hidden, first)").replace(
    LOOP, """        first = hidden + 1
        for layer in self.layers:
            hidden = layer(hidden, first)
""")  # fmt: skip


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(CODE, [True] * 3, id="plain"),
        pytest.param(HANDS_ON_A_MASK, [False] * 3, id="a mask that layers hand on enters them as well"),
        pytest.param(TAKES_A_WEIGHT, [False, True, True], id="a weight is part of a slot"),
        pytest.param(RETURNS_INPUTS, [False, False, True], id="a loss may read what the base returns"),
        pytest.param(IGNORES_AN_ARGUMENT, [False, False, True], id="one memory leaves with one layer"),
    ],
)
def test_what_is_not_the_layers_own_stays(tmp_path: Path, code: str, expected: list[bool]) -> None:
    source = folder_source(build_own_code(tmp_path, code=code), trust_remote_code=True)
    _, activations = discover(source.factory, torch.float32, 1, 8)
    assert activations.private == (False, *expected, False)


@pytest.mark.parametrize("order", LoopOrder)
def test_nothing_of_a_step_is_left_on_the_device(tmp_path: Path, order: LoopOrder) -> None:
    """Whoever read an input between its forward and its backward would find no memory: steps have the same losses."""
    build_tiny(tmp_path)
    batches = tiny_batches(3)
    there, away = (
        train_engine(tmp_path, batches, Recipe(3, micro_batch_size=2), Mode(order, boundaries=tier))
        for tier in (Tier.HBM, Tier.HOST)
    )
    assert there.losses == away.losses
    assert (there.count("boundary"), away.count("boundary")) == (0, 3 * 2 * 2 * (len(away.plan.layers) - 2))
