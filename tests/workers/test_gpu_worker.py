"""GpuWorker with arenas and shards in one process, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import MemoryItem
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.shards.save_gate import NO_ATTEMPT
from megatrain_ray.errors import CapacityError, LostDeviceError, LostProcessError
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.spans import RecordedSpans, Row
from megatrain_ray.workers.arenas import WORDS, WORKING, arena_sizes
from megatrain_ray.workers.gpu_worker import GpuWorker
from megatrain_ray.workers.messages import HeldOutLoss, Progress
from megatrain_ray.workers.open_device import check_free, memory_explained
from megatrain_ray.workers.shard_worker import ShardWorker
from tests.support.runs import config
from tests.support.texts import tokens_of
from tests.support.tiny import VOCAB_SIZE, build_tiny, tiny_batches

MACHINE = Machine(device="cpu", num_cpus=1, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
STEPS = 3
ROW = {
    "step", "loss", "grad_norm", "lr", "tokens", "skipped", "step_s", "tokens_per_s", "model_tflops", "exposed_s",
    "hbm_peak_bytes", "hbm_held_bytes", "host_bytes",
}  # fmt: skip
EXPOSED = {"h2d", "d2h", "optimizer", "host_accumulation", "loss", "data", "python"}
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")


@pytest.fixture
def ready(tmp_path: Path) -> RunSpec:
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), train__steps=STEPS, hardware__num_shards=2)
    return prepare(TrainConfig.model_validate(tree).resolve(), MACHINE)


@pytest.fixture
def handles(ready: RunSpec) -> Iterator[Handles]:
    num_threads = torch.get_num_threads()
    owner = ArenaHolder.create(arena_sizes(ready.plan, ready.structure.layout(ready.plan.num_fragments)))
    yield owner.handles
    owner.close()
    torch.set_num_threads(num_threads)


def batches(ready: RunSpec) -> DataWorker:
    data = ready.config.data
    tokens = tokens_of(data, Path(ready.config.run_dir))
    return DataWorker(
        data, tokens, VOCAB_SIZE, ready.plan.step.micro_batch_size * ready.plan.step.num_micro_batches, 0, None
    )


async def run(
    ready: RunSpec,
    handles: Handles,
    calls: Sequence[int],
    *,
    poison: bool = False,
    evaluations: Sequence[int] = (),
    spans: list[RecordedSpans] | None = None,
    closed_early: bool = False,
) -> list[dict[str, Any]]:
    """Rows of steps called in this order, all before the first has run; in the order of calls.

    `poison`: one weight of the final norm, the last of the working copy, is infinite. `evaluations`: held-out batches
    that are asked for before the first step, in this order; their losses are checked. `spans` gets those of worker and
    shards. `closed_early`: the worker is asked to close while the steps run.
    """
    data = batches(ready)

    async def fetch(step: int) -> Batch:
        return data.batch(step)

    async def fetch_held_out(index: int) -> Batch:
        return tiny_batches(index + 1)[index]

    done: list[int] = []

    async def evaluate(index: int) -> HeldOutLoss:
        loss = await worker.evaluate(0, index)
        done.append(index)
        return loss

    shards = [ShardWorker(ready, k, [handles]) for k in range(ready.plan.shards.num_shards)]
    worker = GpuWorker(ready, [handles], fetch, fetch_held_out)
    await worker.build()  # weights come later
    for shard in shards:
        shard.initialize()
    if poison:
        poison_a_weight(ready, handles)
    await worker.start(Progress(0, 0))
    async with asyncio.TaskGroup() as tasks:
        for shard in shards:
            tasks.create_task(asyncio.to_thread(shard.run, NO_ATTEMPT))
        try:
            async with asyncio.timeout(20):
                losses = await asyncio.gather(*(evaluate(index) for index in evaluations))
                assert done == sorted(evaluations), "every GPU takes them in this order"
                assert all(loss.num_supervised == 128 and 5 < loss.total / 128 < 6 for loss in losses)
                steps = asyncio.gather(*(worker.step(step, save=False) for step in calls))
                if not closed_early:
                    await steps
                if spans is not None:
                    spans += [await worker.spans(2), *[await asyncio.to_thread(shard.spans, 2) for shard in shards]]
        finally:
            await worker.close(len(calls) if closed_early else 0)
            for shard in shards:
                shard.stop()
    results = await steps
    rows = [result.row for result in results]
    last = max((result.progress for result in results), key=lambda progress: progress.step)
    assert last == Progress(len(calls), len(calls) - sum(row["skipped"] for row in rows))
    return rows


def poison_a_weight(ready: RunSpec, handles: Handles) -> None:
    layout = ready.structure.layout(ready.plan.num_fragments)
    with closing(ArenaHolder.adopt([handles])) as holder:
        working = torch.frombuffer(holder.map(WORKING).buffer, dtype=torch.float32)
        head = working[layout.starts[-1] :][: layout.layers[-1].size]
        layout.layers[-1].view(head, "model.norm.weight")[0] = math.inf


async def test_steps_called_in_another_order_give_the_same_rows(ready: RunSpec, handles: Handles) -> None:
    """Ray does not keep the order of calls to an async actor."""
    right = await run(ready, handles, (1, 2, 3))
    wrong = await run(ready, handles, (3, 2, 1))
    assert [row["step"] for row in right] == [1, 2, 3]
    assert [row["step"] for row in wrong] == [3, 2, 1]
    assert [[row[key] for key in NUMBERS] for row in right] == [[row[key] for key in NUMBERS] for row in wrong[::-1]]
    assert right[0]["loss"] > right[2]["loss"]


async def test_closing_waits_for_the_last_step(ready: RunSpec, handles: Handles) -> None:
    """The driver hears of it from the first of several."""
    plain = await run(ready, handles, (1, 2))
    closed = await run(ready, handles, (1, 2), closed_early=True)
    assert [[row[key] for key in NUMBERS] for row in plain] == [[row[key] for key in NUMBERS] for row in closed]


async def test_evaluations_change_no_row(ready: RunSpec, handles: Handles) -> None:
    plain = await run(ready, handles, (1, 2))
    evaluated = await run(ready, handles, (1, 2), evaluations=(2, 1, 0))
    assert [[row[key] for key in NUMBERS] for row in plain] == [[row[key] for key in NUMBERS] for row in evaluated]


async def test_the_keys_of_a_row(ready: RunSpec, handles: Handles) -> None:
    for row in await run(ready, handles, (1, 2)):
        assert row["hbm_held_bytes"] == row["hbm_peak_bytes"]
        assert set(row) - {"update_s"} == ROW  # of an update that has ended by then
        assert set(row["exposed_s"]) == EXPOSED
        assert row["skipped"] is False
        assert row["tokens"] == 4 * 32
        assert row["host_bytes"] == sum(handle.nbytes for handle in handles.values())
        assert math.fsum(row["exposed_s"].values()) <= row["step_s"]


async def test_spans_are_those_of_the_traced_steps(ready: RunSpec, handles: Handles) -> None:
    config = ready.config.model_copy(update={"log": ready.config.log.model_copy(update={"trace": (2, 2)})})
    traced = dataclasses.replace(ready, config=config)
    found: list[RecordedSpans] = []
    await run(traced, handles, (1, 2, 3), spans=found)
    of_worker, *of_shards = found
    assert [span.name for span in of_worker.spans if span.row is Row.STEPS] == ["wait data", "commit", "step 2"]
    assert {span.row for span in of_worker.spans} > {Row.COMPUTE, Row.H2D, Row.D2H, Row.UPLOADS}
    for shard in of_shards:
        updates = [span.layer for span in shard.spans if span.name == "update"]
        assert updates == 2 * list(range(len(ready.plan.layers))), (
            "of steps 1, which runs under the forward of 2, and 2"
        )
    assert sum(recorded.num_dropped for recorded in found) == 0


async def test_a_skipped_step_names_the_parameter(ready: RunSpec, handles: Handles) -> None:
    (row,) = await run(ready, handles, (1,), poison=True)
    assert set(row) - {"update_s"} == {*ROW, "bad_parameter"}
    assert row["skipped"] is True
    assert not math.isfinite(row["grad_norm"])
    names = [s.name for layer in ready.structure.layout().layers for s in layer.owned]
    assert row["bad_parameter"] in names


async def test_another_worker_makes_a_step_once_more(ready: RunSpec, handles: Handles) -> None:
    """The first one is gone behind step 1, with a gradient of step 2 landed; the next one cannot go on from step 0."""
    right = await run(ready, handles, (1, 2, 3))
    data = batches(ready)

    async def fetch(step: int) -> Batch:
        return data.batch(step)

    shards = [ShardWorker(ready, k, [handles]) for k in range(ready.plan.shards.num_shards)]
    workers = [GpuWorker(ready, [handles], fetch, fetch) for _ in range(2)]
    await workers[0].build()
    for shard in shards:
        shard.initialize()
    await workers[0].start(Progress(0, 0))
    rows = []
    async with asyncio.TaskGroup() as tasks:
        for shard in shards:
            tasks.create_task(asyncio.to_thread(shard.run, NO_ATTEMPT))
        try:
            async with asyncio.timeout(60):
                rows.append((await workers[0].step(1, save=False)).row)
                await workers[0].close()
                with closing(ArenaHolder.adopt([handles])) as holder:
                    words = SharedUpdateState(holder.map(WORDS).buffer, len(ready.plan.layers), len(shards))
                    words.gradients.land(0, 2, 0)
                    await workers[1].build()
                    with pytest.raises(LostProcessError, match=r"^update 1 had begun when .* step 0 was the last"):
                        await workers[1].resume(Progress(0, 0))
                    await workers[1].resume(Progress(1, 1))
                    assert not words.gradients.has_landed(0, 2)
                rows += [(await workers[1].step(step, save=False)).row for step in (2, 3)]
        finally:
            await workers[1].close()
            for shard in shards:
                shard.stop()
    assert [[row[key] for key in NUMBERS] for row in rows] == [[row[key] for key in NUMBERS] for row in right]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("CUDA error: an illegal memory access was encountered", LostDeviceError), ("shapes do not fit", RuntimeError)],
)
def test_a_device_that_fails_is_told_from_other_errors(ready: RunSpec, text: str, expected: type[Exception]) -> None:
    with pytest.raises(expected, match=text) as info, memory_explained(ready.plan, "step 7"):
        raise RuntimeError(text)
    assert str(info.value) == (f"step 7: the GPU failed: {text}" if expected is LostDeviceError else text)


async def test_out_of_device_memory_is_explained(
    ready: RunSpec, handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silu(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated …")

    monkeypatch.setattr(torch.nn.functional, "silu", silu)
    limited = dataclasses.replace(
        ready, plan=dataclasses.replace(ready.plan, limits=dataclasses.replace(ready.plan.limits, hbm_bytes=24 << 30))
    )
    with pytest.RaisesGroup(CapacityError, flatten_subgroups=True) as info:
        await run(limited, handles, (1,))
    (error,) = info.value.exceptions
    counted = r"step 1: out of device memory, of which the plan counts \S+ \S+ of 24\.00 GiB; "
    assert re.fullmatch(counted + r".* Tried to allocate 2\.00 GiB\.", str(error))


def test_device_memory_that_others_have_taken_is_named_before_anything_is_loaded(
    ready: RunSpec, handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the limit that leaves them theirs: what is free, plus the context, which is there by then."""
    context = MemoryItem(Tier.HBM, "context", 1 << 30, "")
    plan = dataclasses.replace(ready.plan, memory_items=(*ready.plan.memory_items, context))
    counted = ready.plan.total_bytes(Tier.HBM)
    with ExitStack() as stack:
        device = stack.enter_context(closing(CpuDevice()))
        holder = stack.enter_context(closing(ArenaHolder.adopt([handles])))
        monkeypatch.setattr("megatrain_ray.workers.gpu_worker.make_device", lambda plan, deterministic: device)
        monkeypatch.setattr(ArenaHolder, "adopt", lambda holders: holder)
        check_free(plan, device)  # of host memory nobody knows
        monkeypatch.setattr(device, "free_bytes", lambda: counted)
        check_free(plan, device)
        monkeypatch.setattr(device, "free_bytes", lambda: counted - 1)
        with pytest.raises(CapacityError, match=rf"\(nvidia-smi .* hardware\.hbm_limit={counted - 1 + (1 << 30)}$"):
            GpuWorker(dataclasses.replace(ready, plan=plan), [handles], never, never)


async def never(number: int) -> Batch:
    raise AssertionError(f"batch {number} was asked for")


@pytest.mark.parametrize(
    ("hbm_layers", "doing", "kind", "text", "told"),
    [
        (2, "opening the device", torch.OutOfMemoryError, "CUDA out of memory. Free: 1 MiB. If reserved …", "1 MiB."),
        (2, "opening the device", torch.AcceleratorError, "CUDA error: out of memory\nSearch for …", "out of memory"),
        (0, "building the engine", torch.OutOfMemoryError, "CUDA out of memory. Free: 1 MiB.", "1 MiB."),
    ],
    ids=["layers", "context", "slots"],
)
async def test_out_of_device_memory_before_the_first_step_is_explained(
    ready: RunSpec,
    hbm_layers: int,
    doing: str,
    kind: type[RuntimeError],
    text: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most of the memory that a plan counts is taken then, where another process may hold it."""

    def allocate(device: CpuDevice, num_bytes: int) -> torch.Tensor:
        raise kind(text)

    tree = ready.config.model_dump(mode="json")
    tree["hardware"]["hbm_layers"] = hbm_layers
    run_spec = prepare(TrainConfig.model_validate(tree), MACHINE)
    owner = ArenaHolder.create(arena_sizes(run_spec.plan, run_spec.structure.layout(run_spec.plan.num_fragments)))
    data = batches(run_spec)
    monkeypatch.setattr(CpuDevice, "allocate", allocate)

    async def fetch(step: int) -> Batch:
        return data.batch(step)

    async with AsyncExitStack() as stack:
        stack.callback(owner.close)
        adopt = ArenaHolder.adopt
        monkeypatch.setattr(ArenaHolder, "adopt", lambda holders: stack.enter_context(closing(adopt(holders))))
        with pytest.raises(CapacityError, match=f"^{doing}: out of device memory, .* {re.escape(told)}$"):
            worker = GpuWorker(run_spec, [owner.handles], fetch, fetch)
            stack.push_async_callback(lambda: worker._host.close())
            await worker.build()
