"""What a run moves on the disk, measured where it is moved, is what its plan says.

Shards and GPU worker run in one process, without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.accounting.prediction_check import Comparison, compare
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.shards.save_gate import NO_ATTEMPT
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.planning.run_spec import RunSpec, planning_problem, prepare
from megatrain_ray.report.measured_starts import comparison_table
from megatrain_ray.spans import Row, Span
from megatrain_ray.workers.arenas import activations_file, arena_sizes, spill_files
from megatrain_ray.workers.gpu_worker import GpuWorker
from megatrain_ray.workers.messages import Progress
from megatrain_ray.workers.shard_worker import ShardWorker
from tests.support.runs import config, write_config
from tests.support.spilling import least_ram, long_model
from tests.support.texts import tokens_of

STEPS = 6
TRACED = STEPS - 1


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Prepare a run whose plan has all on disk that may be there: activations, gradients, state and working copies."""
    folder = tmp_path_factory.mktemp("run")
    tree = config(
        folder / "run", long_model(folder), data__seq_len=64, train__steps=STEPS,
        train__micro_batch_size=2, train__accumulate=2, hardware__num_shards=2, spill__path=str(folder / "spill"),
        spill__compression="none", log__trace=[TRACED, TRACED],
    )  # fmt: skip
    written = load_config(write_config(folder / "config.yaml", tree))
    machine = replace(planning_problem(written).machine, ram_bytes=least_ram(folder, tree))
    return prepare(written, machine)


@pytest.fixture
def handles(ready: RunSpec) -> Iterator[Handles]:
    num_threads = torch.get_num_threads()
    layout = ready.structure.layout()
    owner = ArenaHolder.create(
        arena_sizes(ready.plan, layout), spill_files(ready.plan, layout, ready.config.spill.path)
    )
    yield owner.handles
    owner.close()
    torch.set_num_threads(num_threads)


async def run(ready: RunSpec, handles: Handles) -> tuple[list[dict[str, Any]], Sequence[Span]]:
    """Train with an evaluation after the second and the last step.

    Returns the rows of all steps, and the spans of the GPU worker's trace.
    """
    config, plan = ready.config, ready.plan
    tokens = tokens_of(config.data, Path(config.run_dir))
    data, held_out = (DataWorker(config.data, tokens, 320, 4, 0, None) for _ in range(2))

    async def fetch(step: int) -> Batch:
        return data.batch(step)

    async def fetch_held_out(index: int) -> Batch:
        return held_out.batch(index + 1)

    shards = [ShardWorker(ready, k, [handles]) for k in range(plan.shards.num_shards)]
    worker = GpuWorker(ready, [handles], fetch, fetch_held_out)
    await worker.build()
    for shard in shards:
        shard.initialize()
    await worker.start(Progress(0, 0))
    rows = []
    async with asyncio.TaskGroup() as tasks:
        for shard in shards:
            tasks.create_task(asyncio.to_thread(shard.run, NO_ATTEMPT))
        try:
            for step in range(1, STEPS + 1):
                rows.append((await worker.step(step, save=False)).row)
                if step in (2, STEPS):
                    await worker.evaluate(step, 0)
            spans = (await worker.spans(TRACED)).spans
        finally:
            await worker.close()
            for shard in shards:
                shard.stop()
    return rows, spans


def compared(ready: RunSpec, rows: Sequence[dict[str, Any]]) -> Comparison:
    found = compare(ready.plan, rows)
    assert found is not None
    return found


async def test_a_step_moves_what_the_plan_says(ready: RunSpec, handles: Handles) -> None:
    plan = ready.plan
    assert plan.weights_on_disk and plan.disk_activations and plan.gradients_on_disk
    rows, spans = await run(ready, handles)
    found = compared(ready, rows)
    weights, activations = found.term("weights read"), found.term("activation traffic")
    assert weights and weights.measured == weights.predicted == plan.disk.weight_read_bytes
    assert activations and activations.measured == activations.predicted
    assert activations.measured == 2 * sum(
        row.num_bytes for row in plan.memory_items if (row.tier, row.name) == (Tier.NVME, "activations")
    )
    for row in rows:
        assert row["disk_bytes"]["weights_read"] == plan.disk.weight_read_bytes, "none of an evaluation"
        assert row["disk_bytes"]["activations_read"] == row["disk_bytes"]["activations_written"]

    traffic, disk, taken = (found.term(name) for name in ("disk traffic", "disk", "on disk"))
    files = sum(handle.nbytes for handle in handles.values() if handle.path)
    assert traffic and disk and taken
    of_shards = traffic.measured - weights.measured - activations.measured
    in_files = files - handles[activations_file(0)].nbytes
    assert of_shards == pytest.approx(2 * in_files, rel=0.05)  # what is written behind an update may end later
    assert traffic.measured <= traffic.predicted
    assert taken.measured == files <= taken.predicted
    step_s = sum(row["step_s"] for row in rows[2:]) / (STEPS - 2)
    assert 0 < disk.measured <= step_s * (1 + 1e-9)
    assert not [term.name for term in found.off(plan.prediction) if term.is_of_bytes]  # type: ignore[arg-type]
    assert {"disk, a step", "of it weights", "of it activations"} <= {
        line[:18].strip() for line in comparison_table(found)
    }
    assert_traced(ready, spans)


def assert_traced(ready: RunSpec, spans: Sequence[Span]) -> None:
    """Assert that the disk's row of the trace has all bytes of a step."""
    num_bytes: dict[str, int] = {}
    for span in spans:
        if span.row is Row.DISK:
            num_bytes[span.name] = num_bytes.get(span.name, 0) + span.num_bytes
    of_activations = sum(ready.plan.disk_activations)
    assert num_bytes == {
        "read weights": ready.plan.disk.weight_read_bytes,
        "write boundary": of_activations,
        "read boundary": of_activations,
    }
