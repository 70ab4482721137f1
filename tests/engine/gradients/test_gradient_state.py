"""A layer's gradient goes through the states of its plan; every other call is refused, with the state that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.gradients.gradient_state import GradientState, GradientStateError
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.layout.tier import Tier
from tests.support.reference import MuonRecipe, Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.tiny import build_tiny

LAYER = 2
Verb = Callable[["Bench"], object]


class Bench:
    """Holds a store whose transfers end at once, and brings the gradient of one layer into any state."""

    def __init__(self, folder: Path, device: CpuDevice, mode: Mode, muon: MuonRecipe | None = None) -> None:
        source = folder_source(build_tiny(folder))
        structure, plan = plan_for(source.factory, Recipe(1, micro_batch_size=2, muon=muon), mode, (4, 32))
        layout = structure.layout()
        self.gradients = {s.name: torch.ones(s.shape) for s in layout.layers[LAYER].trained_segments}
        self.store = GradientStore(plan, layout, device, poison=True)
        self.device = device

    @property
    def state(self) -> GradientState:
        return self.store._layers[LAYER].state

    def add(self, *, last: bool) -> None:
        self.store.add(LAYER, self.gradients, last=last)

    def open_sums(self) -> None:
        self.store.open_sums(LAYER, [])

    def offload_partial(self) -> None:
        self.store.offload_partial(LAYER).done.set_result(self.device.record())

    def load_partial(self) -> None:
        self.store.load_partial(LAYER).done.set_result(self.device.record())

    def finalize(self) -> None:
        offload = self.store.finalize(LAYER)
        if offload is not None:
            offload.done.set_result(self.device.record())

    def reload(self) -> None:
        self.store.reload_final(LAYER).done.set_result(self.device.record())

    def read(self) -> None:
        with self.store.reloaded(LAYER):
            assert self.state is GradientState.RELOADED


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with closing(CpuDevice()) as device:
        yield device


def test_a_sum_on_the_host(tmp_path: Path, device: CpuDevice) -> None:
    bench = Bench(tmp_path, device, Mode(sums=Tier.HOST))
    states = [bench.state]
    for call in (
        bench.open_sums,
        lambda: bench.add(last=False),
        bench.offload_partial,
        bench.load_partial,
        lambda: bench.add(last=True),
        bench.finalize,
        bench.store.begin,
    ):
        call()
        states.append(bench.state)
    assert [state.name for state in states] == [
        "EMPTY", "ALLOCATED", "ACCUMULATING", "PARTIAL_OFFLOADED", "LOADING_PARTIAL", "ACCUMULATING", "OFFLOADED",
        "EMPTY",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("take", "state"),
    [
        (lambda bench: bench.store.offload_deferred(LAYER), GradientState.OFFLOADED),
        (lambda bench: bench.store.pop_deferred(LAYER), GradientState.RELEASED),
    ],
    ids=["updated by a shard", "updated on the device"],
)
def test_a_deferred_gradient(tmp_path: Path, device: CpuDevice, take: Verb, state: GradientState) -> None:
    bench = Bench(tmp_path, device, Mode(gradients=Tier.HBM))
    bench.add(last=True)
    bench.finalize()
    assert bench.state is GradientState.DEFERRED
    take(bench)
    assert bench.state is state
    with pytest.raises(GradientStateError, match=f"is {state.name}; expected DEFERRED"):
        take(bench)


def test_a_gradient_that_muon_reads_again(tmp_path: Path, device: CpuDevice) -> None:
    bench = Bench(tmp_path, device, Mode(), MuonRecipe())
    bench.add(last=True)
    bench.finalize()
    bench.reload()
    assert bench.state is GradientState.RELOADING
    bench.read()
    assert bench.state is GradientState.RELEASED


def test_a_replay_of_a_captured_step_restores_what_waits(tmp_path: Path, device: CpuDevice) -> None:
    bench = Bench(tmp_path, device, Mode(gradients=Tier.HBM))
    bench.add(last=True)
    bench.finalize()
    completed = bench.store.completed()
    bench.store.begin()
    bench.store.restore(completed)
    assert bench.state is GradientState.DEFERRED
    assert bench.store.pop_deferred(LAYER) is completed.deferred[LAYER].flat


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (Bench.offload_partial, "is EMPTY; expected ACCUMULATING to offload its partial sum"),
        (Bench.load_partial, "is EMPTY; expected PARTIAL_OFFLOADED to load its partial sum"),
        (Bench.finalize, "is EMPTY; expected ACCUMULATING to complete it"),
        (Bench.reload, "is EMPTY; expected OFFLOADED to reload it"),
        (Bench.read, "is EMPTY; expected RELOADING to read it"),
        (lambda bench: bench.store.pop_deferred(LAYER), "expected DEFERRED to update the layer on the device"),
        (lambda bench: bench.store.offload_deferred(LAYER), "expected DEFERRED to offload it after the backward"),
    ],
)
def test_refused_of_an_empty_gradient(tmp_path: Path, device: CpuDevice, verb: Verb, message: str) -> None:
    bench = Bench(tmp_path, device, Mode())
    with pytest.raises(GradientStateError, match=message):
        verb(bench)


@pytest.mark.parametrize("verb", [Bench.finalize, Bench.offload_partial, lambda bench: bench.add(last=True)])
def test_refused_of_a_complete_gradient(tmp_path: Path, device: CpuDevice, verb: Verb) -> None:
    bench = Bench(tmp_path, device, Mode())
    bench.add(last=True)
    bench.finalize()
    with pytest.raises(GradientStateError, match=r"gradient of layers?\.?.* is OFFLOADED; expected"):
        verb(bench)


def test_a_partial_sum_on_the_host_is_loaded_before_it_grows(tmp_path: Path, device: CpuDevice) -> None:
    bench = Bench(tmp_path, device, Mode(sums=Tier.HOST))
    bench.add(last=False)
    bench.offload_partial()
    with pytest.raises(GradientStateError, match="is PARTIAL_OFFLOADED; expected ALLOCATED or ACCUMULATING to add"):
        bench.add(last=True)
