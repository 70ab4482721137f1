"""The resident ceiling runs the layers, the head and the loss of a training step, and moves nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from megatrain_ray.bench.resident_ceiling import SizeTrial, measure_ceiling, search
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.measure.resident_model import ResidentModel
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.planning.run_spec import prepare
from megatrain_ray.virtual_clock import Record, Stage
from tests.support.recipes import step_input
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for, train_engine
from tests.support.runs import config
from tests.support.tiny import VOCAB_SIZE, build_tiny, tiny_batches


def computed(records: Iterable[Record]) -> Counter[tuple[str, int]]:
    return Counter((r.op.name, r.op.layer) for r in records if r.stage is Stage.COMPUTE)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_computes_what_one_of_a_training_does(tmp_path: Path, tied: bool) -> None:
    folder = build_tiny(tmp_path / "model", tied=tied)
    [batch], recipe = tiny_batches(1), Recipe(1, micro_batch_size=4)
    trained = train_engine(folder, [batch], recipe, Mode(num_fragments=3))
    factory = folder_source(folder).factory
    recomputing = Mode(num_fragments=3, activations=ActivationPolicy.RECOMPUTE)
    structure, plan = plan_for(factory, recipe, recomputing, (4, 32))
    device = CpuDevice(num_threads=1)
    with device.activate():
        runner = ResidentModel(factory, structure, plan, device).with_micro_batch(4, Objective())
        output = runner.read(runner.submit(step_input(1, batch, recipe)))
    device.close()
    assert computed(device.timeline.records) == computed(trained.records[0])
    assert {record.stage for record in device.timeline.records} == {Stage.COMPUTE}
    assert output.loss == pytest.approx(math.log(VOCAB_SIZE), rel=0.02)  # of weights that know nothing


def of_sizes(fitting: int, rates: dict[int, float], size: int) -> float:
    if size > fitting:
        raise torch.OutOfMemoryError
    return rates[size]


@pytest.mark.parametrize(
    ("first", "limit", "fitting", "rates", "tried"),
    [
        (1, None, 64, {1: 10.0, 2: 20.0, 4: 30.0, 8: 30.1}, [(1, 10.0), (2, 20.0), (4, 30.0), (8, 30.1)]),  # no gain
        (2, None, 4, {2: 10.0, 4: 20.0}, [(2, 10.0), (4, 20.0), (8, None)]),
        (16, None, 5, {4: 10.0}, [(16, None), (8, None), (4, 10.0)]),
        (4, None, 0, {}, [(4, None), (2, None), (1, None)]),
        (2, 4, 64, {2: 10.0, 4: 20.0}, [(2, 10.0), (4, 20.0)]),
        (3, 5, 64, {3: 10.0}, [(3, 10.0)]),
    ],
)
def test_the_search_for_the_best_micro_batch(
    first: int, limit: int | None, fitting: int, rates: dict[int, float], tried: list[tuple[int, float | None]]
) -> None:
    trials = search(lambda size: of_sizes(fitting, rates, size), first, limit)
    assert trials == tuple(SizeTrial(*each) for each in tried)


def test_the_best_trial_is_the_ceiling(tmp_path: Path) -> None:
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), train__micro_batch_size=2, train__accumulate=2)
    machine = Machine(device="cpu", num_cpus=1, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
    ceiling = measure_ceiling(prepare(TrainConfig.model_validate(tree).resolve(), machine))
    assert [trial.micro_batch_size for trial in ceiling.trials] == [2, 4]  # no larger than the step's batch
    assert ceiling.best is not None
    assert ceiling.best.model_tflops == max(trial.model_tflops or 0.0 for trial in ceiling.trials)
    assert ceiling.hbm_peak_bytes > 0
