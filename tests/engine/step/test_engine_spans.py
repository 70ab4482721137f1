"""Spans of a step in one process: what is recorded is what the event log says was done, in real time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatrain_ray.accounting.trace_file import lanes
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.spans import Row, Span
from megatrain_ray.virtual_clock import Record, Stage, Timeline
from tests.support.reference import MuonRecipe, Recipe
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STAGES = {Row.COMPUTE: Stage.COMPUTE, Row.H2D: Stage.H2D, Row.D2H: Stage.D2H}
WITHIN_COMPUTE = ("accumulate", "norms", "between layers")  # which the virtual clock does not count


def trace(folder: Path, recipe: Recipe, mode: Mode) -> tuple[EngineResult, tuple[Span, ...]]:
    build_tiny(folder)
    devices: list[CpuDevice] = []

    def make(timeline: Timeline, num_threads: int) -> CpuDevice:
        device = CpuDevice(timeline, num_threads)
        device.start_tracing()
        devices.append(device)
        return device

    result = train_engine(folder, tiny_batches(2), recipe, mode, make_device=make)
    return result, devices[0].spans.take().spans


def done(records: list[tuple[Record, ...]], stage: Stage) -> list[tuple[str, int, int, int]]:
    ops = [record.op for step in records for record in step if record.stage is stage]
    return [(op.name, op.layer, op.micro_batch, op.num_bytes) for op in ops]


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        (Recipe(2, micro_batch_size=4), Mode()),
        (Recipe(2), Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_fragments=3)),
        (Recipe(2), Mode(sums=Tier.HOST)),
        (Recipe(2, muon=MuonRecipe()), Mode(LoopOrder.LAYERS_OUTER)),
    ],
)
def test_spans_are_the_operations_of_the_event_log(tmp_path: Path, recipe: Recipe, mode: Mode) -> None:
    result, spans = trace(tmp_path, recipe, mode)
    for row, stage in STAGES.items():
        of_row = [span for span in spans if span.row is row]
        assert len(lanes(of_row)) == 1, "a stage does one thing at a time"
        work = [span for span in of_row if not span.waits and span.name not in WITHIN_COMPUTE]
        assert sorted((s.name, s.layer, s.micro_batch, s.num_bytes) for s in work) == sorted(
            done(result.records, stage)
        )
        assert all(span.num_bytes > 0 for span in work) is (stage is not Stage.COMPUTE)


def test_waits_are_the_exposed_seconds(tmp_path: Path) -> None:
    result, spans = trace(tmp_path, Recipe(2), Mode())
    exposed_s: Counter[str] = Counter()
    for report in result.reports:
        exposed_s.update(report.exposed_s)
    traced_s: Counter[str] = Counter()
    for span in spans:
        if span.row is Row.COMPUTE and span.waits:
            traced_s[span.name.removeprefix("wait ")] += (span.end_ns - span.start_ns) / 1e9
    assert traced_s == pytest.approx(exposed_s)


def test_the_event_loop_says_what_it_waits_for_and_when_gradients_land(tmp_path: Path) -> None:
    result, spans = trace(tmp_path, Recipe(2, micro_batch_size=4), Mode())
    num_layers = len(result.plan.layers)
    names = Counter((span.row, span.name) for span in spans)
    assert names[Row.STEPS, "commit"] == 2
    assert names[Row.LANDINGS, "land"] == names[Row.GRADIENTS, "wait room"] == 2 * num_layers
    loads = result.count("load")
    assert names[Row.UPLOADS, "wait generation"] == loads
    assert 0 < names[Row.UPLOADS, "wait slot"] < loads, "the first ones have room"
    leaving = {span.layer: span for span in spans if span.name == "offload"}  # of the second step
    landing = {span.layer: span for span in spans if span.name == "land"}
    assert all(leaving[layer].end_ns <= landing[layer].start_ns for layer in range(num_layers))


def test_tracing_changes_no_digit_and_what_is_off_leaves_nothing(tmp_path: Path) -> None:
    traced, _ = trace(tmp_path / "a", Recipe(2), Mode())
    devices: list[CpuDevice] = []

    def make(timeline: Timeline, num_threads: int) -> CpuDevice:
        devices.append(CpuDevice(timeline, num_threads))
        return devices[0]

    build_tiny(tmp_path / "b")
    plain = train_engine(tmp_path / "b", tiny_batches(2), Recipe(2), Mode(), make_device=make)
    assert (traced.losses, traced.grad_norms) == (plain.losses, plain.grad_norms)
    assert devices[0].spans.take().spans == ()
