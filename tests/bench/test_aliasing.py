"""Benchmarks of models that the host cannot hold: layers share its memory, and all else is as in an ordinary run."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from megatrain_ray.accounting.trace_file import find_traces, read_trace
from megatrain_ray.bench import aliased_memory as aliasing
from megatrain_ray.bench.aliased_memory import HostMemory, with_aliases
from megatrain_ray.bench.bench import _check_updates
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.plan.plan_shards import shard_layout
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.shards.device_shard import DeviceShard
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.model.engine_settings import adamw_constants
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.report.inspect_run import inspect_run
from megatrain_ray.run.train_output import TrainOutput
from megatrain_ray.workers.arenas import arena_sizes
from tests.support.runs import cli_here, config, plan_of, rows, write_config
from tests.support.tiny import VOCAB_SIZE
from tests.support.traces import begin, check_format

MIB = 1 << 20
GIVEN = 10 * MIB  # of the 32 MiB that layers take on the host
MODEL = {
    "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MACHINE = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
ALIASED = {"aliased"}


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    return config(
        run_dir, MODEL, train__precision="bf16", train__batch_size=4, train__micro_batch_size=2, train__accumulate=2,
        hardware__num_shards=2, **changes,
    )  # fmt: skip


class Bench(NamedTuple):
    run_dir: Path
    report: dict[str, Any]
    said: str


def bench(folder: Path, *options: str) -> Bench:
    file = write_config(folder / "bench.yaml", settings(folder / "other"))
    lengths = ("--warmup=0", "--steps=1", "--no-ceiling")
    done = cli_here("bench", str(file), "--json", *lengths, *options, f"run_dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    return Bench(folder / "run", json.loads(done.stdout), done.stderr)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> Bench:
    return bench(tmp_path_factory.mktemp("ordinary"))


@pytest.fixture(scope="module")
def aliased(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> Bench:
    return bench(tmp_path_factory.mktemp("aliased"), f"--alias-host-memory={GIVEN}")


def work(run: Bench) -> Counter[tuple[str, str, str, str, str]]:
    """Count what was done in the traced step and for it, by process, row, name, layer and bytes of each span."""
    threads = check_format(read_trace(*find_traces(run.run_dir)))
    committed = next(begin(span) for span in threads["GPU worker", "steps"] if span["name"] == "commit")
    return Counter(
        (*names, span["name"], str(span["args"].get("layer")), str(span["args"].get("bytes")))
        for names, spans in threads.items()
        for span in spans
        if span["cat"] == "work" and (names[1] != "updates" or begin(span) >= committed)
    )


def shared_bytes(run: Bench) -> int:
    """Return the bytes of arenas that processes of the run have touched."""
    processes = run.report["memory"]["pss_bytes_by_process"]
    return sum(processes[name]["shared"] for name in ("GPU worker", "optimizer shard 0", "optimizer shard 1"))


@pytest.mark.long
def test_a_step_does_what_an_ordinary_one_does(ordinary: Bench, aliased: Bench) -> None:
    assert plan_of(aliased.run_dir) == plan_of(ordinary.run_dir)
    done = work(aliased)
    assert done == work(ordinary)
    by_name = Counter[str]()
    for (_, _, name, _, _), count in done.items():
        by_name[name] += count
    assert by_name["update"] == 2 * by_name["land"] == 2 * 14, "two shards, 14 layers"
    assert by_name["load"] == plan_of(aliased.run_dir).slots.num_uploads


@pytest.mark.long
def test_memory_is_what_was_given(ordinary: Bench, aliased: Bench) -> None:
    found, journals = aliased.report["aliased"], 6.2 * MIB
    assert found["planned_bytes"] == ordinary.report["memory"]["arena_bytes"] > 4 * GIVEN
    assert 0.8 * GIVEN < found["held_bytes"] - journals < GIVEN + MIB
    assert aliased.report["memory"]["arena_bytes"] == found["held_bytes"]
    assert {row["host_bytes"] for row in rows(aliased.run_dir)} == {found["held_bytes"]}
    # Journals are touched as far as they are used.
    for run, num_bytes in ((ordinary, found["planned_bytes"]), (aliased, found["held_bytes"])):
        assert num_bytes - journals - MIB < shared_bytes(run) < num_bytes + MIB


@pytest.mark.long
def test_weights_stay_what_they_are(aliased: Bench) -> None:
    """Otherwise the updates of many layers would make weights grow until a step is skipped."""
    found = rows(aliased.run_dir)
    assert [(row["lr"], row["skipped"]) for row in found] == [(0.0, False)] * 2
    assert all(5.4 < row["loss"] < 5.7 for row in found), "that of a model that knows nothing of 257 bytes: 5.55"
    assert all(row["grad_norm"] > 0 for row in found)


@pytest.mark.long
def test_everything_says_so(ordinary: Bench, aliased: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    from megatrain_ray.bench.bench_report import print_table

    assert ordinary.report["aliased"] is None
    assert aliased.report["aliased"]["note"] == aliasing.NOTE == "host memory aliased: losses mean nothing"
    assert aliasing.NOTE in aliased.said
    assert "cpu, host memory aliased" in (aliased.run_dir / "logs" / "driver.log").read_text()
    assert aliased.said.count("no loss: host memory is aliased") == 2
    assert "loss 5." not in aliased.said
    common = rows(ordinary.run_dir)[0].keys() | {"update_s"}  # only in rows of steps in which an update ended
    assert [row.keys() - common for row in rows(aliased.run_dir)] == [ALIASED] * 2
    assert inspect_run(aliased.run_dir)[0].count("host memory aliased: the loss means nothing") == 2
    print_table(aliased.report)
    assert f"NOTE {aliasing.NOTE}; host memory takes" in " ".join(capsys.readouterr().out.split())
    print_table(ordinary.report)
    assert "alias" not in capsys.readouterr().out


def test_training_has_none_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path / "train.yaml", settings(tmp_path / "run"))
    with pytest.raises(SystemExit, match="2"):
        cli_here("train", str(file), f"--alias-host-memory={GIVEN}")
    for setting in ("hardware.alias_host_memory=1GiB", "alias_host_memory=1GiB"):
        assert cli_here("train", str(file), setting).returncode == 2
    assert not (tmp_path / "run").exists()


def test_a_benchmark_of_it_cannot_be_made_to_save(tmp_path: Path) -> None:
    file = write_config(tmp_path / "bench.yaml", settings(tmp_path / "run"))
    done = cli_here("bench", str(file), f"--alias-host-memory={GIVEN}", "save_every=5")
    assert done.returncode == 2
    assert "save_every: a benchmark sets it itself" in done.stderr


def test_a_size_is_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli_here("bench", str(tmp_path), "--alias-host-memory=much")


def run_spec(tmp_path: Path, **changes: Any) -> RunSpec:
    changes = {"save_every": None, **changes}
    return prepare(TrainConfig.model_validate(settings(tmp_path / "run", **changes)).resolve(), MACHINE)


def test_a_run_that_saves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_every is 0: nothing of such a run can be saved"):
        with_aliases(run_spec(tmp_path, save_every=0), GIVEN)


def test_state_on_disk_is_refused(tmp_path: Path) -> None:
    """A residual from there beside another weight's zero would be a NaN."""
    ready = run_spec(tmp_path)
    first, *others = ready.plan.layers
    layers = (dataclasses.replace(first, state=type(first.state).NVME), *others)
    with pytest.raises(ConfigError, match=r"activations of 1 layers on disk, .* leave spill.path out"):
        with_aliases(dataclasses.replace(ready, plan=dataclasses.replace(ready.plan, layers=layers)), GIVEN)


def test_less_than_a_layer_takes_is_refused(tmp_path: Path) -> None:
    ready = run_spec(tmp_path)
    largest = max(layer.size for layer in ready.structure.layout().layers)
    with pytest.raises(ConfigError, match=r"--alias-host-memory 1.00 MiB: the largest layer alone takes 2.\d\d MiB"):
        with_aliases(ready, MIB)
    with pytest.raises(ConfigError, match="largest layer"):
        with_aliases(ready, 16 * largest - 1)
    assert with_aliases(ready, 16 * largest).structure.aliased_size == largest


@pytest.mark.parametrize("changes", [{}, {"train__optimizer": "muon"}, {"train__freeze": ["mlp"]}], ids=str)
def test_places_lie_in_what_there_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whole layers; the first ones, which are loaded, meet no other."""
    ready = with_aliases(run_spec(tmp_path, **changes), GIVEN)
    plan, layout = ready.plan, ready.structure.layout(ready.plan.num_fragments)
    held = layout.size_among(plan.host_layers)
    assert held == layout.aliased_size
    for start, layer in zip(layout.starts_among(plan.host_layers), layout.layers, strict=True):
        assert 0 <= start <= start + layer.size <= held
    for index in range(plan.shards.num_shards):
        part = shard_layout(plan, layout, index)
        for kind, starts in (("m", part.starts), ("v", part.v_starts)):
            ends = [start + part.span_of(i, kind).size for i, start in enumerate(starts)]
            assert max(ends) <= part.size_of(kind) <= max(held // 2 + 2048, *ends)
        filled = sorted(part.filled)
        assert filled == list(range(len(filled)))
        assert list(part.working_starts[: len(filled)]) == sorted(part.working_starts[: len(filled)])
        assert part.working_starts[len(filled)] == 0


def test_memory_that_is_enough_is_taken_once(tmp_path: Path) -> None:
    plain = run_spec(tmp_path)
    ready = with_aliases(plain, 1 << 30)
    assert HostMemory.of(ready).held_bytes == HostMemory.of(ready).planned_bytes
    sizes = [arena_sizes(x.plan, x.structure.layout(x.plan.num_fragments)) for x in (plain, ready)]
    assert sizes[0] == sizes[1]


def test_layers_on_the_device_have_memory_of_their_own(tmp_path: Path) -> None:
    ready = run_spec(tmp_path)
    layers = tuple(
        dataclasses.replace(layer, weights=type(layer.weights).HBM, updated_by="gpu") for layer in ready.plan.layers
    )
    ready = dataclasses.replace(ready, plan=dataclasses.replace(ready.plan, layers=layers))
    layout = with_aliases(ready, GIVEN).structure.layout(ready.plan.num_fragments)
    shard = DeviceShard(ready.plan, layout, CpuDevice(), adamw_constants(ready.config.train))
    assert shard.memory.numel() == layout.size > 2 * (layout.aliased_size or 0)
    assert shard.layout.working_starts == layout.starts == shard.layout.starts


def test_skipped_updates_are_no_speed() -> None:
    output = SimpleNamespace(rows=[{"step": step, "skipped": step == 2} for step in (1, 2)])
    with pytest.raises(MegatrainError, match=r"updates of steps \[2\] were skipped"):
        _check_updates(cast(TrainOutput, output))
