"""Activations leave the device and come back: memory, order, and which may not."""

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

from megatrain_ray import virtual_clock
from megatrain_ray.engine.activations.activation_store import SMALL_BYTES, ActivationStore, owned_storages
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.activation_moves import Stop
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder, Phase, visits
from megatrain_ray.errors import MegatrainError
from megatrain_ray.virtual_clock import Op
from tests.support.deferred_device import LateDevice
from tests.support.own_code import CODE, build_own_code
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, train_engine
from tests.support.tiny import build_tiny, tiny_batches

NUM_LAYERS, NUM_BYTES = 4, 64  # embedding, two blocks, head
BLOCKS = (1, 2)


@dataclass
class Stage:
    """Holds a store, and a device to run it on."""

    store: ActivationStore
    device: CpuDevice

    def begin(self, num_micro_batches: int = 2) -> None:
        self.store.begin(visits(NUM_LAYERS, num_micro_batches, LoopOrder.LAYERS_OUTER))


def layer_plan(boundary: Tier | None = Tier.HBM, kept_bytes: int = 0) -> LayerPlan:
    kept = Tier.HOST if kept_bytes else Tier.HBM
    return cast(LayerPlan, SimpleNamespace(boundary=boundary, kept=kept, kept_bytes=kept_bytes))


def plan_of(layers: Sequence[LayerPlan], host_bytes: int = 0) -> Plan:
    replayed = frozenset(i - 1 for i, layer in enumerate(layers) if layer.boundary is None)
    until = [(i,) for i in range(len(layers))]
    facts = {"host_activation_bytes": host_bytes, "replayed_layers": replayed, "kept_until": until}
    return cast(Plan, SimpleNamespace(layers=layers, settles=False, **facts))


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice()
    yield opened
    opened.close()


@pytest.fixture
def stage(device: CpuDevice) -> Stage:
    layers = [layer_plan(Tier.HOST if i in BLOCKS else Tier.HBM) for i in range(NUM_LAYERS)]
    room = 2 * len(BLOCKS) * NUM_BYTES
    return Stage(ActivationStore(plan_of(layers, room), device, room), device)


def entering(value: float) -> torch.Tensor:
    return torch.full((NUM_BYTES // 4,), value)


def held(tensors: dict[Any, torch.Tensor]) -> set[Any]:
    """Whose memory is there."""
    return {key for key, tensor in tensors.items() if tensor.untyped_storage().nbytes()}


def backward(layer: int, micro_batch: int = 0) -> Stop:
    return Stop(Phase.BACKWARD, layer, micro_batch)


def test_what_is_computed_again_is_let_go_of_behind_its_forward(device: CpuDevice) -> None:
    layers = [layer_plan(None if i == 2 else Tier.HBM) for i in range(NUM_LAYERS)]
    store = ActivationStore(plan_of(layers), device, 0)
    store.begin(visits(NUM_LAYERS, 1, LoopOrder.LAYERS_OUTER, replayed={1}))
    tensors = {layer: entering(float(layer)) for layer in BLOCKS}
    for layer, tensor in tensors.items():
        store.offload(layer, 0, [tensor], [])
    assert held(tensors) == {1}
    store.reload(backward(2))  # what fills it is the replay of the layer before
    assert held(tensors) == {1}


def test_memory_goes_one_forward_later_and_comes_one_backward_ahead(stage: Stage) -> None:
    tensors = {(layer, j): entering(float(10 * layer + j)) for layer in BLOCKS for j in (0, 1)}
    seen = []
    stage.begin()
    for (layer, j), tensor in tensors.items():
        stage.store.offload(layer, j, [tensor], [])
        seen.append(held(tensors) - {key for key in tensors if key > (layer, j)})
    assert seen == [{(1, 0)}, {(1, 1)}, {(2, 0)}, {(2, 1)}]
    for entry, there in (
        ((2, 0), {(2, 0), (2, 1)}),
        ((2, 1), {(2, 0), (2, 1), (1, 0)}),
        ((1, 0), {(2, 0), (2, 1), (1, 0), (1, 1)}),
        ((1, 1), {(2, 0), (2, 1), (1, 0), (1, 1)}),
    ):
        stage.store.reload(backward(*entry))
        assert held(tensors) == there
        assert torch.equal(tensors[entry], entering(float(10 * entry[0] + entry[1])))


def test_the_first_to_come_back_is_on_its_way_while_a_layer_runs_whose_own_stayed(device: CpuDevice) -> None:
    layers = [layer_plan(Tier.HOST if i == 1 else Tier.HBM) for i in range(NUM_LAYERS)]
    stage = Stage(ActivationStore(plan_of(layers, 4 * NUM_BYTES), device, 4 * NUM_BYTES), device)
    tensors = {(1, j): entering(float(j)) for j in (0, 1)}
    stage.begin()
    for (layer, j), tensor in tensors.items():
        stage.store.offload(layer, j, [tensor], [])
    stage.store.reload(backward(2, 0))
    assert held(tensors) == {(1, 1)}, "it has not been let go of before"
    stage.store.reload(backward(2, 1))
    assert held(tensors) == {(1, 0)}
    stage.store.reload(backward(1, 0))
    assert held(tensors) == {(1, 0), (1, 1)}


def test_what_is_back_is_freed_with_its_tensors() -> None:
    """A backward frees what it has used; the store must not have it as well."""
    layers = [layer_plan(Tier.HOST if i == 1 else Tier.HBM) for i in range(NUM_LAYERS)]
    device = LateDevice()  # which has nothing of copies that have run
    store = ActivationStore(plan_of(layers, NUM_BYTES), device, NUM_BYTES)
    store.begin(visits(NUM_LAYERS, 1, LoopOrder.LAYERS_OUTER))
    tensor = entering(1.0)
    store.offload(1, 0, [tensor], [])
    store.reload(backward(2))
    store.reload(backward(1))
    device.close()
    assert torch.equal(tensor, entering(1.0))
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2, "the tensor and what asks"


def test_who_shares_memory_has_it_back(stage: Stage) -> None:
    """The leaf that collects gradients and what autograd saved are other tensors of the same memory."""
    tensor = entering(3.0)
    alias, half = tensor.detach(), tensor[: NUM_BYTES // 8]
    stage.begin(1)
    stage.store.offload(1, 0, [tensor, half], [])
    stage.store.offload(2, 0, [entering(4.0)], [])
    assert alias.untyped_storage().nbytes() == 0
    stage.store.reload(backward(2))
    stage.store.reload(backward(1))
    assert torch.equal(alias, entering(3.0))
    assert torch.equal(half, entering(3.0)[: NUM_BYTES // 8])


def test_memory_is_filled_behind_all_that_was_submitted_before(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all submitted work is done, the memory may belong to others, of whom the transfer's stage knows nothing."""
    recorded: list[Event] = []
    record, copy_all = stage.device.record, stage.device.copy_all
    behind: list[bool] = []

    def note() -> Event:
        recorded.append(record())
        return recorded[-1]

    def watch(kind: virtual_clock.Stage, pairs: Any, op: Op, after: Sequence[Event]) -> Event:
        if kind is virtual_clock.Stage.H2D:
            behind.append(any(event is recorded[-1] for event in after))
        return copy_all(kind, pairs, op, after)

    tensors = [entering(float(layer)) for layer in BLOCKS]
    stage.begin(1)
    for layer, tensor in zip(BLOCKS, tensors, strict=True):
        stage.store.offload(layer, 0, [tensor], [])
    monkeypatch.setattr(stage.device, "record", note)
    monkeypatch.setattr(stage.device, "copy_all", watch)
    stage.store.reload(backward(2))
    assert len(recorded) == 2
    assert behind == [True, True]


def test_layers_whose_inputs_stay_keep_them(stage: Stage) -> None:
    tensor = entering(1.0)
    stage.begin(1)
    stage.store.offload(0, 0, [tensor], [])
    stage.store.offload(3, 0, [tensor], [])
    stage.store.reload(backward(0))
    assert tensor.untyped_storage().nbytes() == NUM_BYTES
    assert stage.device.timeline.records == ()


def test_more_than_the_plan_has_room_for_is_an_error(stage: Stage) -> None:
    stage.begin(1)
    with pytest.raises(MegatrainError, match="take 320 bytes of host memory, the plan has 256"):
        stage.store.offload(1, 0, [torch.zeros(80)], [])


def test_memory_that_is_aliased_is_taken_in_turn(device: CpuDevice) -> None:
    """What a layer left lies in one piece. If only half of it has room, it begins where the first layer's began.

    So layers that leave alike read each other's indices as indices. The plan bounds the bytes all the same.
    """
    plan = plan_of([layer_plan(Tier.HOST)] * NUM_LAYERS, 4 * NUM_BYTES)
    store = ActivationStore(plan, device, 5 * NUM_BYTES // 2)
    store.begin(visits(NUM_LAYERS, 1, LoopOrder.LAYERS_OUTER))
    for layer in range(NUM_LAYERS):
        halves = [torch.full((NUM_BYTES // 8,), layer + half) for half in (0.0, 0.5)]
        store.offload(layer, 0, halves, [])
    with pytest.raises(MegatrainError, match="take 320 bytes of host memory, the plan has 256"):
        store.offload(0, 0, [entering(4.0)], [])
    device.close()
    assert store._buffer._memory.view(torch.float32)[:32:8].tolist() == [2.0, 2.5, 3.0, 3.5]


SIZE = 2 * SMALL_BYTES


def test_what_is_kept_comes_back_in_one_piece_with_what_entered(device: CpuDevice) -> None:
    """It is one operation each way, however many storages there are. For a replay only the boundary comes back."""
    layers = [layer_plan(Tier.HOST, 2 * SIZE) if i in BLOCKS else layer_plan() for i in range(NUM_LAYERS)]
    layers[2] = layer_plan(None, 2 * SIZE)
    room = 4 * SIZE + NUM_BYTES
    stage = Stage(ActivationStore(plan_of(layers, room), device, room), device)
    stage.store.begin(visits(NUM_LAYERS, 1, LoopOrder.LAYERS_OUTER, replayed={1}))
    kept = {(i, k): torch.full((SIZE,), 10 * i + k, dtype=torch.uint8) for i in BLOCKS for k in (0, 1)}
    entered = entering(5.0)
    stage.store.offload(1, 0, [entered], [kept[1, 0], kept[1, 1]])
    stage.store.offload(2, 0, [], [kept[2, 0], kept[2, 1]])
    assert held(kept) == {(2, 0), (2, 1)}
    stage.store.reload(Stop(Phase.REPLAY, 1, 0))
    assert held(kept) == {(2, 0), (2, 1)}, "the next one's, as they left last"
    assert torch.equal(entered, entering(5.0))
    stage.store.reload(backward(2))
    assert held(kept) == {*kept}
    stage.store.reload(backward(1))
    assert all(bool((tensor == 10 * i + k).all()) for (i, k), tensor in kept.items())
    moved = [(str(r.op), r.op.num_bytes) for r in device.timeline.records if r.stage is virtual_clock.Stage.H2D]
    assert moved == [("boundary[1.0]", NUM_BYTES), ("kept[2.0]", 2 * SIZE), ("kept[1.0]", 2 * SIZE)]


def test_what_somebody_else_has_is_not_owned() -> None:
    """Whoever has a view, wherever that is, is a reference; the two halves of one storage are one."""
    first, second = torch.zeros(2 * SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    small = torch.zeros(SMALL_BYTES - 1, dtype=torch.uint8)
    saved = [first[:SIZE].data, first[SIZE:].data, second.data, small.data]
    assert owned_storages(saved, 10 * SIZE) == []
    view = first[:1]
    del first, second, small
    assert [storage.nbytes() for storage in owned_storages(saved, 10 * SIZE)] == [SIZE]
    del view
    assert [storage.nbytes() for storage in owned_storages(saved, 10 * SIZE)] == [2 * SIZE, SIZE]
    assert [storage.nbytes() for storage in owned_storages(saved, 2 * SIZE)] == [2 * SIZE], "as many as fit"
    assert [storage.nbytes() for storage in owned_storages(saved, 2 * SIZE - 1)] == [SIZE]


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
SCALES_BETWEEN = CODE.replace(LOOP, """        for layer in self.layers:
            hidden = layer(hidden) * 2.0
""")  # fmt: skip
SCALES_IN_PLACE = SCALES_BETWEEN.replace("layer(hidden) * 2.0", "layer(hidden).mul_(2.0)")
HAS_NO_VERSIONS = CODE.replace("forward(self, hidden)", "forward(self, hidden, shift)").replace(
    "self.norm(hidden +", "self.norm(hidden + shift +"
).replace(LOOP, """        with torch.inference_mode():
            shift = torch.ones_like(hidden) / 2
        for layer in self.layers:
            hidden = layer(hidden, shift)
""")  # fmt: skip


@pytest.mark.parametrize(
    ("code", "expected", "again"),
    [
        pytest.param(CODE, [True] * 3, [False, True, True], id="plain"),
        pytest.param(HANDS_ON_A_MASK, [False] * 3, [False] * 3, id="a mask that layers hand on enters them as well"),
        pytest.param(TAKES_A_WEIGHT, [False, True, True], [False, True, True], id="a weight is part of a slot"),
        pytest.param(RETURNS_INPUTS, [False, False, True], [False, False, True], id="a loss may read what is returned"),
        pytest.param(IGNORES_AN_ARGUMENT, [False, False, True], [False] * 3, id="one memory leaves with one layer"),
        pytest.param(SCALES_BETWEEN, [True] * 3, [False] * 3, id="no layer makes what the model does between them"),
        pytest.param(SCALES_IN_PLACE, [True] * 3, [False] * 3, id="nor what it does in their memory"),
        pytest.param(HAS_NO_VERSIONS, [True] * 3, [False, True, True], id="made in inference mode"),
    ],
)
def test_what_is_not_the_layers_own_stays(tmp_path: Path, code: str, expected: list[bool], again: list[bool]) -> None:
    source = folder_source(build_own_code(tmp_path, code=code), trust_remote_code=True)
    _, activations = discover(source.factory, torch.float32, 1, 8)
    assert activations.private == (False, *expected, False)
    assert activations.replayable == (False, *again, False)


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
