"""A captured step is the step: the same bits, from memory that stays where it is; and when a plan has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Capture
from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.attention import as_uncaptured
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import CapacityError, CaptureError, ConfigError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.virtual_clock import Timeline
from tests.support.reference import Recipe
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.shapes import qwen
from tests.support.tiny import build_tiny, tiny_batches, weigh

# `make test-all` runs the products.
pytestmark = pytest.mark.pairwise

ALL = frozenset(range(5))  # layers of the tiny model
STEPS = 4
CAPTURED = Mode(hbm_layers=ALL, captured=True)


class CountingDevice(CpuDevice):
    """A device that counts the replays of each capture in `num_replays`."""

    def __init__(self, timeline: Timeline, num_threads: int) -> None:
        super().__init__(timeline, num_threads)
        self.num_replays: list[int] = []

    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        self.num_replays.append(0)
        return _Counted(super().capture(function), self.num_replays, len(self.num_replays) - 1)


class _Counted:
    def __init__(self, capture: Capture, counts: list[int], index: int) -> None:
        self._capture, self._counts, self._index = capture, counts, index
        self.outputs = capture.outputs

    def replay(self) -> None:
        self._counts[self._index] += 1
        self._capture.replay()

    def close(self) -> None:
        self._capture.close()


class ForgetfulDevice(CountingDevice):
    """A device whose replays leave nothing in the engine's objects, because a replay runs no Python."""

    stores: list[GradientStore]

    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        def run() -> Sequence[torch.Tensor]:
            outputs = function()
            for store in self.stores if self.num_replays[-1] else ():
                store.begin()
            return outputs

        return super().capture(run)


class UnableDevice(CountingDevice):
    """Captures one function and no other."""

    def capture(self, function: Callable[[], Sequence[torch.Tensor]]) -> Capture:
        if self.num_replays:
            raise CaptureError("it waits for the device")
        return super().capture(function)


def both(
    folder: Path,
    recipe: Recipe,
    mode: Mode,
    batches: Sequence[Batch],
    kind: type[CountingDevice] = CountingDevice,
    **options: Any,
) -> tuple[EngineResult, EngineResult, list[CountingDevice]]:
    """Train captured and uncaptured; return both results, and the devices of both."""
    devices: list[CountingDevice] = []

    def make(timeline: Timeline, num_threads: int) -> CpuDevice:
        devices.append(kind(timeline, num_threads))
        return devices[-1]

    modes = mode, replace(mode, captured=False)
    ours, theirs = (train_engine(folder, batches, recipe, m, make_device=make, **options) for m in modes)
    return ours, theirs, devices


def assert_equal(ours: EngineResult, theirs: EngineResult) -> None:
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_captured_steps_are_bit_equal(tmp_path: Path, order: LoopOrder, micro_batch_size: int, tied: bool) -> None:
    """Steps have other numbers of supervised tokens, or loss weights. Evaluations between them are not captured."""
    build_tiny(tmp_path, tied=tied)
    batches = [weigh(batch) if tied else _unsupervised(batch, 7 * i) for i, batch in enumerate(tiny_batches(STEPS))]
    recipe = Recipe(STEPS, precision="bf16", micro_batch_size=micro_batch_size)
    mode = replace(CAPTURED, order=order)
    ours, theirs, devices = both(tmp_path, recipe, mode, batches, held_out=tiny_batches(2))
    assert [device.num_replays for device in devices] == [[STEPS], []]
    assert_equal(ours, theirs)
    assert ours.evaluations == theirs.evaluations


def _unsupervised(batch: Batch, count: int) -> Batch:
    targets = batch.targets.clone()
    targets.view(-1)[:count] = -100
    return replace(batch, targets=targets, num_supervised=int((targets != -100).sum()))


def test_a_replay_leaves_what_its_capture_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny(tmp_path)
    stores: list[GradientStore] = []
    begin = GradientStore.__init__

    def remembered(store: GradientStore, *args: Any, **kwargs: Any) -> None:
        begin(store, *args, **kwargs)
        stores.append(store)

    def make(timeline: Timeline, num_threads: int) -> CpuDevice:
        device = ForgetfulDevice(timeline, num_threads)
        device.stores = stores
        return device

    monkeypatch.setattr(GradientStore, "__init__", remembered)
    recipe, batches = Recipe(STEPS, precision="bf16", micro_batch_size=2), tiny_batches(STEPS)
    ours = train_engine(tmp_path, batches, recipe, CAPTURED, make_device=make)
    assert_equal(ours, train_engine(tmp_path, batches, recipe, replace(CAPTURED, captured=False)))


def test_rows_of_several_documents_have_a_graph_of_their_own(tmp_path: Path) -> None:
    """Documents begin at other places in each step.

    Rows of one document among them run as packed ones do: attention has masks, which round differently.
    """
    build_tiny(tmp_path)
    recipe = Recipe(STEPS, precision="fp32", micro_batch_size=2)
    ours, theirs, devices = both(tmp_path, recipe, CAPTURED, _some_of_two_documents())
    assert devices[0].num_replays == [1, STEPS - 1]
    assert_equal(ours, theirs)


def _some_of_two_documents() -> list[Batch]:
    """Return batches of rows of two documents, except the third, whose rows have one."""
    rows = tiny_batches(STEPS)
    lengths = [5 * (i + 1) for i in range(STEPS)]
    positions = [torch.cat([torch.arange(n), torch.arange(32 - n)]).repeat(4, 1) for n in lengths]
    batches = [replace(b, positions=p) for b, p in zip(rows, positions, strict=True)]
    return [*batches[:2], rows[2], batches[3]]


def test_where_a_kind_of_step_cannot_be_captured_none_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_tiny(tmp_path)
    recipe = Recipe(STEPS, precision="bf16", micro_batch_size=2)
    with caplog.at_level(logging.INFO):
        ours, theirs, devices = both(tmp_path, recipe, CAPTURED, _some_of_two_documents(), UnableDevice)
    told = [(r.levelname, r.getMessage()) for r in caplog.records]  # of an actor nobody sees less than a warning
    assert told == [("WARNING", "steps run uncaptured, layer by layer: it waits for the device")]
    assert [device.num_replays for device in devices] == [[0], []]
    assert_equal(ours, theirs)


def test_a_captured_step_that_is_skipped_names_the_parameter(tmp_path: Path) -> None:
    """Losses that are divided by 0 have gradients that are not finite."""
    build_tiny(tmp_path)
    batches = tiny_batches(STEPS)
    batches[1] = replace(batches[1], num_supervised=0)
    recipe = Recipe(STEPS, precision="bf16", micro_batch_size=2)
    ours, theirs, _ = both(tmp_path, recipe, CAPTURED, batches)
    bad = [report.bad_parameter for report in ours.reports]
    assert bad == [None, "model.embed_tokens.weight", None, None]
    assert bad == [report.bad_parameter for report in theirs.reports]
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


def test_gradients_of_a_captured_step_have_a_place(tmp_path: Path) -> None:
    """They have it also where others are allocated as activations are released."""
    build_tiny(tmp_path)
    recipe = Recipe(1, micro_batch_size=4)
    results = [train_engine(tmp_path, tiny_batches(1), recipe, replace(CAPTURED, captured=c)) for c in (True, False)]
    assert not results[0].plan.gradients_allocated_on_demand
    assert results[1].plan.gradients_allocated_on_demand
    trained = 4 * sum(layer.num_trained for layer in results[0].plan.layers)
    assert results[0].device_bytes - results[1].device_bytes >= trained


def test_masks_of_a_capture_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Transformers model makes explicit ones while a stream is captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert import_utils.is_tracing()
    with as_uncaptured():
        assert not import_utils.is_tracing()
    assert import_utils.is_tracing()


MACHINE = Machine("cuda", num_cpus=16, num_nodes=1, ram_bytes=1 << 37, hbm_bytes=140 << 30, profile=TYPICAL_GPU)
SMALL = {"hidden": 896, "heads": 14, "kv_heads": 2, "inner": 4864}
LARGE = {"hidden": 3584, "heads": 28, "kv_heads": 4, "inner": 18944}


def planned(sequences: int, *, hbm_bytes: int = 140 << 30, shape: dict[str, int] = SMALL, **changes: Any) -> Plan:
    structure, activations = qwen(8, 1024, **shape)
    request = Request(Precision.BF16, False, True, 1, sequences, 1024, free_split=True, saves=False)
    machine = replace(MACHINE, hbm_bytes=hbm_bytes)
    return make_plan(structure, activations, machine, replace(request, **changes))


def test_a_step_is_captured_where_its_launches_take_longer() -> None:
    small = planned(1)
    assert small.step.captured
    assert "launches  one for a step's forward and backward" in describe(small)
    uncaptured = planned(1, captured=False)
    assert not uncaptured.step.captured
    assert small.prediction and uncaptured.prediction
    assert small.prediction.step_s < 0.8 * uncaptured.prediction.step_s
    assert not planned(64).step.captured
    assert not planned(16, shape=LARGE).step.captured
    assert planned(64, captured=True).step.captured


def test_a_captured_step_has_its_memory_to_itself() -> None:
    """Gradients stay, and an evaluation has the work of a layer beside it."""
    captured, uncaptured = (
        {row.name: row.num_bytes for row in planned(1, captured=c).memory_items if row.tier is Tier.HBM}
        for c in (True, False)
    )
    assert captured.pop("beside the capture") == captured["work"]
    assert captured.pop("gradients in HBM") > uncaptured.pop("gradients in HBM")
    assert captured == uncaptured


@pytest.mark.spread(4)
@pytest.mark.parametrize("hbm_gib", [4, 6, 10, 20])
@pytest.mark.parametrize("sequences", [1, 4])
def test_the_fastest_of_both_is_taken(hbm_gib: int, sequences: int) -> None:
    """Each with the memory that it takes: a captured step may keep less and still be faster."""
    plans = {}
    for captured in (None, False, True):
        with suppress(CapacityError):
            plans[captured] = planned(sequences, hbm_bytes=hbm_gib << 30, captured=captured)
    seconds = {captured: plan.prediction.step_s for captured, plan in plans.items() if plan.prediction}
    assert seconds[None] == min(seconds.values())
    assert all(plan.step.captured is captured for captured, plan in plans.items() if captured is not None)
    assert (True in plans) is (hbm_gib >= 10)


def test_nothing_of_a_captured_step_waits_for_the_host() -> None:
    """Not even where that would leave room for more."""
    fits = [plan for gib in range(4, 24, 3) if (plan := _captured_within(gib << 30))]
    assert fits
    for plan in fits:
        assert (plan.host_layers, plan.gradients.sums, plan.host_boundary_bytes) == (frozenset(), Tier.HBM, 0)


def _captured_within(hbm_bytes: int) -> Plan | None:
    try:
        return planned(16, hbm_bytes=hbm_bytes, captured=True)
    except CapacityError:
        return None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hbm_layers": 4}, "hardware.hbm_layers is 4, and all 10 layers must live in GPU memory"),
        ({"clip": False}, "with train.clip: null layers are updated within it"),
    ],
)
def test_what_cannot_be_captured_is_refused_where_it_is_asked_for(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(1, captured=True, **changes)
    assert str(refused.value) == f"hardware.cuda_graphs: a step cannot be captured: {problem}; set it to auto"
    assert not planned(1, **changes).step.captured


def test_no_gpu_no_capture() -> None:
    structure, activations = qwen(8, 1024, **SMALL)
    request = Request(Precision.BF16, False, True, 1, 1, 1024, captured=True)
    machine = replace(MACHINE, device="cpu", hbm_bytes=None)
    with pytest.raises(ConfigError, match="there is no GPU"):
        make_plan(structure, activations, machine, request)


def test_a_step_that_has_no_room_is_refused_by_the_name_of_what_asks_for_it() -> None:
    message = r"^hardware\.cuda_graphs: with a captured step, all layers in GPU memory: needs .* of device memory"
    with pytest.raises(CapacityError, match=message) as refused:
        planned(1, hbm_bytes=4 << 30, captured=True)
    assert "train.clip=null" not in str(refused.value)
    assert not planned(1, hbm_bytes=4 << 30).step.captured
