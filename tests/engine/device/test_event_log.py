"""What a step does, in which order, how often, and what overlaps: read off the event log of the virtual clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.virtual_clock import Op, Record, Stage, Timeline
from tests.support.reference import Recipe
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

ONE_MICRO_BATCH = Recipe(2, micro_batch_size=4)


def run(
    folder: Path, mode: Mode, recipe: Recipe = ONE_MICRO_BATCH, *, num_layers: int = 3, **kwargs: object
) -> EngineResult:
    build_tiny(folder, num_layers=num_layers)
    return train_engine(folder, tiny_batches(1), recipe, mode, **kwargs)  # type: ignore[arg-type]


def test_the_order_of_a_step_of_three_layers(tmp_path: Path) -> None:
    """Layer 0 is the embedding, 4 the head. Two slots for blocks: 1 comes back for its backward, 2 and 3 stayed."""
    records = run(tmp_path, Mode()).records[0]
    assert [f"{r.start_s:.0f} {r}" for r in records] == [
        "0 h2d:load[0/0]",
        "1 compute:forward[0.0]",
        "1 h2d:load[1/0]",
        "2 compute:forward[1.0]",
        "2 h2d:load[2/0]",
        "3 compute:forward[2.0]",
        "3 h2d:load[3/0]",
        "4 compute:forward[3.0]",
        "4 h2d:load[4/0]",
        "5 compute:forward[4.0]",
        "6 compute:loss[4.0]",
        "7 compute:backward[4.0]",
        "8 compute:backward[3.0]",
        "8 d2h:offload[4]",
        "9 compute:backward[2.0]",
        "9 h2d:load[1/0]",
        "9 d2h:offload[3]",
        "10 compute:backward[1.0]",
        "10 d2h:offload[2]",
        "11 compute:backward[0.0]",
        "11 d2h:offload[1]",
        "12 d2h:offload[0]",
        "13 optimizer:update[0]",
        "14 optimizer:update[1]",
        "15 optimizer:update[2]",
        "16 optimizer:update[3]",
        "17 optimizer:update[4]",
    ]


def test_the_log_is_the_same_every_time(tmp_path: Path) -> None:
    mode = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3)
    first = run(tmp_path / "a", mode, Recipe(2)).records
    assert first == run(tmp_path / "b", mode, Recipe(2)).records


@pytest.mark.parametrize("num_layers", [3, 6])
@pytest.mark.parametrize("num_block_slots", [2, 3])
@pytest.mark.parametrize("num_fragments", [1, 3])
def test_uploads_of_a_step(tmp_path: Path, num_layers: int, num_block_slots: int, num_fragments: int) -> None:
    """2L - slots, for one micro-batch and for any number of them with layers outermost."""
    mode = Mode(LoopOrder.LAYERS_OUTER, num_fragments=num_fragments, num_block_slots=num_block_slots)
    result = run(tmp_path, mode, Recipe(1), num_layers=num_layers)
    blocks, edges = 2 * num_layers - num_block_slots, 2 * 2 - 2
    assert result.count("load") == blocks * num_fragments + edges == result.plan.slots.num_uploads


def test_uploads_with_micro_batches_outermost(tmp_path: Path) -> None:
    """Each further micro-batch finds the layers in place that the last backward ended with: 2L - 2 slots."""
    result = run(tmp_path, Mode(), Recipe(1), num_layers=6)
    first, further = 2 * 6 - 2, 2 * 6 - 2 * 2
    assert result.count("load") == first + 3 * further + (2 * 2 - 2)


@pytest.mark.parametrize("order", LoopOrder)
def test_forwards_of_a_step(tmp_path: Path, order: LoopOrder) -> None:
    """One forward for each layer and micro-batch when activations are kept, two when they are recomputed."""
    kept = run(tmp_path / "k", Mode(order, ActivationPolicy.KEEP), Recipe(1))
    recomputed = run(tmp_path / "r", Mode(order, ActivationPolicy.RECOMPUTE), Recipe(1))
    assert kept.count("forward", "recompute") == (3 + 2) * 4
    assert recomputed.count("forward", "recompute") == (2 * 3 + 2) * 4


@pytest.mark.parametrize("order", LoopOrder)
def test_device_memory_is_what_the_plan_says(tmp_path: Path, order: LoopOrder) -> None:
    """What the engine allocates: slots and gradient slots, nothing else and nothing per layer."""
    result = run(tmp_path, Mode(order, num_fragments=3), Recipe(1))
    plan = result.plan
    rows = {row.name: row.num_bytes for row in plan.memory_items if row.tier is Tier.HBM}
    assert result.device_bytes == rows["slots"] + rows["gradient slots"]
    assert rows["slots"] == sum(slot.num_bytes for slot in plan.slots.weights)
    assert len(plan.slots.gradient_bytes) == (5 if order is LoopOrder.MICRO_BATCHES_OUTER else 2)


def costs(stage: Stage, op: Op) -> float:
    """Return costs in which loading a layer takes as long as computing it, so hiding it is worth half of the time."""
    return {Stage.COMPUTE: 1.0, Stage.H2D: 1.0, Stage.D2H: 1.0, Stage.OPTIMIZER: 0.5}[stage]


class SynchronousDevice(CpuDevice):
    """A device whose transfers block whoever submits them and the compute stage, which streaming is there to avoid."""

    def copy(self, stage: Stage, target: Tensor, source: Tensor, op: Op, after: Sequence[Event]) -> Event:
        return self._blocking(stage, lambda: CpuDevice.copy(self, stage, target, source, op, after))

    def copy_all(self, stage: Stage, pairs: Sequence[tuple[Tensor, Tensor]], op: Op, after: Sequence[Event]) -> Event:
        return self._blocking(stage, lambda: CpuDevice.copy_all(self, stage, pairs, op, after))

    def _blocking(self, stage: Stage, submit: Callable[[], Event]) -> Event:
        self.timeline.stage_waits(stage, self.timeline.now(Stage.COMPUTE))
        event = submit()
        self.timeline.stage_waits(Stage.COMPUTE, event.at_s)
        return event


def makespan(records: tuple[Record, ...]) -> float:
    return max(r.end_s for r in records if r.stage is not Stage.OPTIMIZER)


def busy(records: tuple[Record, ...]) -> float:
    return sum(r.end_s - r.start_s for r in records if r.stage is not Stage.OPTIMIZER)


def overlap(records: tuple[Record, ...]) -> float:
    """Stages that worked at the same time, on average."""
    return busy(records) / makespan(records)


def test_three_stages_overlap(tmp_path: Path) -> None:
    records = run(tmp_path, Mode(activations=ActivationPolicy.RECOMPUTE), num_layers=8, cost=costs).records[0]
    compute = sum(r.end_s - r.start_s for r in records if r.stage is Stage.COMPUTE)
    # Exposed: the first load, and the last offload.
    assert makespan(records) == compute + 2
    assert overlap(records) > 1.6


def test_a_synchronous_stage_would_be_seen(tmp_path: Path) -> None:
    def make(timeline: Timeline, threads: int) -> Device:
        return SynchronousDevice(timeline, threads)

    mode = Mode(activations=ActivationPolicy.RECOMPUTE)
    records = run(tmp_path, mode, num_layers=8, cost=costs, make_device=make).records[0]
    assert overlap(records) < 1.2


def test_transfers_run_on_threads_of_their_own(tmp_path: Path) -> None:
    """Three real threads: no copy is made by the compute thread or the event loop."""
    seen: dict[str, set[str]] = {}

    class Watched(CpuDevice):
        def _copy(
            self, stage: Stage, target: Tensor, source: Tensor, op: Op, after: Sequence[Event], end_s: float
        ) -> Event:
            class Probe:
                at_s = 0.0

                def synchronize(self) -> None:
                    seen.setdefault(stage.value, set()).add(threading.current_thread().name)

            probe: Event = Probe()
            return CpuDevice._copy(self, stage, target, source, op, [*after, probe], end_s)

    run(tmp_path, Mode(), make_device=Watched)
    assert seen == {"h2d": {"h2d"}, "d2h": {"d2h"}}


def test_updates_hide_under_the_next_forward(tmp_path: Path) -> None:
    """Exact clipping: layer i of step 2 waits for its own update only, and the rest of the update runs meanwhile."""
    build_tiny(tmp_path, num_layers=8)
    recipe = Recipe(2, micro_batch_size=4)
    result = train_engine(tmp_path, tiny_batches(2), recipe, Mode(), cost=costs)
    second = result.records[1]
    first_forward = next(r for r in second if r.op.name == "forward")
    updates = [r for records in result.records for r in records if r.op.name == "update"][: len(result.plan.layers)]
    assert [r.op.layer for r in updates] == list(range(10))
    assert first_forward.start_s < updates[-1].start_s


def test_without_clipping_updates_run_under_backward(tmp_path: Path) -> None:
    records = run(tmp_path, Mode(), Recipe(1, micro_batch_size=4, clip=None), num_layers=8, cost=costs).records[0]
    updates = [r for r in records if r.op.name == "update"]
    last_backward = max(r.start_s for r in records if r.op.name == "backward")
    assert [r.op.layer for r in updates] == list(reversed(range(10)))
    assert sum(r.start_s < last_backward for r in updates) > 5


def test_every_layer_leaves_once(tmp_path: Path) -> None:
    records = run(tmp_path, Mode(), Recipe(1)).records[0]
    counts = Counter(r.op.layer for r in records if r.op.name == "offload")
    assert counts == dict.fromkeys(range(5), 1)
