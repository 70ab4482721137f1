"""What a run says of itself before its first step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.start_summary import describe_start
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.io.batching.data_counts import DataCounts
from megatrain_ray.io.checkpoints.leftovers import Leftovers
from tests.support.planned_steps import PROFILE, planned
from tests.support.runs import config
from tests.support.tiny import build_tiny


def test_model_data_step_memory_and_time_are_told(tmp_path: Path) -> None:
    plan = planned(PROFILE)
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), train__steps=40, train__warmup_steps=3)
    written = TrainConfig.model_validate(tree)
    rows = 20 * plan.batch_size
    counts = DataCounts(
        num_records=50, num_cut=3, num_dropped=2, num_tokens=12345, num_rows=rows, longest=901, num_bad=1
    )
    told = partial(describe_start, written, plan, model_type="llama", num_made=10, leftovers=Leftovers())
    lines = list(told(counts=counts, num_held_out=7))
    assert [line.split()[0] for line in lines] == ["model", "data", "step", "memory", "time"]
    model, data, step, memory, time = lines
    assert model.startswith("model     llama, ")
    fates = "3 cut, 1 bad and skipped, 1 dropped; data.seq_len=900 would hold the longest"
    rows_and_steps = f"{rows} rows of {plan.step.seq_len} tokens; 40 steps of {plan.batch_size} rows are 2 epochs"
    assert data == f"data      50 records ({fates}), 12.3k tokens, {rows_and_steps}; 7 records held out"
    none_held_out = f"{rows_and_steps}; none held out (data.eval_fraction)"
    named = told(counts=counts, num_held_out=7, unreached=[f"model.layers.*.part_{i}" for i in range(6)])
    assert list(named)[1] == (
        "untouched since no gradient reaches them: model.layers.*.part_0, model.layers.*.part_1, "
        "model.layers.*.part_2, model.layers.*.part_3 and 2 more"
    )
    uncounted = replace(counts, num_records=None)  # of tokens that an earlier release cached
    assert list(told(counts=uncounted, num_held_out=None))[1] == f"data      12.3k tokens, {none_held_out}"
    assert step.endswith("learning rate 0.000914 at step 11, falling to 0 (peak 0.001)")
    late = list(told(counts=counts, num_held_out=None, num_made=37))[2]
    assert late.endswith(" at step 38, falling to 0 (peak 0.001); train.schedule=constant makes it 0.001")
    first = list(told(counts=counts, num_held_out=None, num_made=0))[2]
    assert first.endswith("learning rate 0.001, cosine to 0 after 3 steps of warm-up")
    short = TrainConfig.model_validate({**tree, "train": {**tree["train"], "steps": 3}})
    of_start = partial(describe_start, model_type="llama", num_made=0, leftovers=Leftovers(), counts=counts)
    few = list(of_start(short, plan, num_held_out=None, epochs=3.0))
    assert few[2] == "few       3 steps may teach little: a smaller train.batch_size makes more"
    assert "RAM " in memory
    assert time.startswith("time      predicted ")
    assert time.endswith(" for 30 steps")


def test_only_memory_with_a_limit_is_told(tmp_path: Path) -> None:
    plan = planned(PROFILE)
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"))
    with_disk = replace(plan, limits=replace(plan.limits, hbm_bytes=1 << 30, spill_bytes=1 << 40), prediction=None)
    counts = DataCounts(num_records=9, num_cut=0, num_dropped=0, num_tokens=9, num_rows=9)
    told = list(
        describe_start(
            TrainConfig.model_validate(tree),
            with_disk,
            model_type="x",
            counts=counts,
            num_held_out=None,
            num_made=0,
            leftovers=Leftovers(),
        )
    )
    assert told[-1].startswith("memory    GPU ")
    assert told[-1].endswith("of 1.00 TiB")
    assert with_disk.total_bytes(Tier.HOST) > 0
