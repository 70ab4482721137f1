"""A run with Ray uses two NUMA nodes that are made by hand.

CPU 0 is one, CPU 1 the other, and the memory of both is the kernel's node 0. So threads and memory are really put where
the plan says, on any machine with two CPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_ray.commands.doctor import examine
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.engine.device.numa_homes import GpuHome, Home
from megatrain_ray.io.arenas.arena_holder import HUGE_PAGE
from megatrain_ray.report.inspect_run import inspect_run
from megatrain_ray.report.page_placement import pages_of
from megatrain_ray.run.run_processes import GPU, gpu_name, shard_name
from megatrain_ray.trainer import Trainer
from megatrain_ray.training_run import TrainingRun
from megatrain_ray.workers.arenas import SLAB, WORKING, journal_arena, state_arena
from tests.runs.test_crew import SHAPES, losses_of, run_spec, started
from tests.support.in_process import actors_as_threads
from tests.support.runs import config, losses, plan_of

CPUS = sorted(os.sched_getaffinity(0))[:2]
NODES = [{"cpus": str(cpu), "memory": 0, "gpu": k == 1} for k, cpu in enumerate(CPUS)]
SHARDS = [shard_name(0), shard_name(1)]

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 4.2M parameters: on several nodes shards are cut at huge pages, and smaller layers are one shard's."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=259, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(shape).save_pretrained(path)
    return path


def settings(run_dir: Path, model: Path, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return config(
        run_dir, model, train__steps=3, train__precision="bf16", hardware__num_shards=2, hardware__nodes=nodes,
        save_every=None,
    )  # fmt: skip


def threads_of(pid: int) -> set[str]:
    """CPUs that its threads may run on."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found |= {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")}
    return found


def policies_of(pid: int) -> Mapping[str, set[str]]:
    """Return the memory policies of a process by arena, as the kernel has them."""
    found: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if "memfd:megatrain-" in line:
            arena = line.split("memfd:megatrain-")[1].split("\\040")[0][9:]
            found.setdefault(arena, set()).add(line.split()[1])
    return found


@pytest.mark.long
def test_threads_and_pages_are_where_the_plan_has_them(tmp_path: Path, ray_address: str, model: Path) -> None:
    plain, placed = tmp_path / "plain", tmp_path / "placed"
    one_node = [{"cpus": f"{CPUS[0]},{CPUS[1]}"}]
    with actors_as_threads():
        Trainer(args=settings(plain, model, one_node)).train()
    seen: dict[str, Any] = {}

    def look(job: RunContext, crew: WorkerGroup) -> None:
        """Record what the kernel has at the end of the run, when every thread has worked."""
        pids = crew.pids
        seen["threads"] = {name: threads_of(pids[name]) for name in (*SHARDS, GPU)}
        seen["policies"] = {name: policies_of(pids[name]) for name in (*SHARDS, GPU)}
        seen["pages"] = {name: pages_of(pids[name]) for name in (*SHARDS, GPU)}
        seen["inspected"] = inspect_run(placed)[0]
        seen["examined"] = [str(finding) for finding in examine(placed) if finding.topic == "pages"]

    _LookingRun(settings(placed, model, NODES), look).run()
    first, second = (Home((k,), str(cpu), (0,)) for k, cpu in enumerate(CPUS))
    plan = plan_of(placed)
    assert (plan.shards.homes, plan.shards.num_threads) == ((first, second), 1)
    assert plan.hosts.gpu_homes == (GpuHome(None, second),)
    assert plan_of(plain).shards.homes == ()
    assert seen["threads"] == {SHARDS[0]: {first.cpus}, SHARDS[1]: {second.cpus}, GPU: {second.cpus}}
    for k, name in enumerate(SHARDS):
        policies, pages = seen["policies"][name], seen["pages"][name]
        assert policies[state_arena(k)] == policies[journal_arena(k)] == {"prefer:0"}
        assert "prefer:0" in policies[WORKING]
        assert list(pages[state_arena(k)]) == list(pages[WORKING]) == [0]
        assert sum(pages[state_arena(k)].values()) > HUGE_PAGE // 4096, "each shard has several huge pages of state"
    assert seen["policies"][GPU][SLAB] == {"prefer:0"}
    assert list(seen["pages"][GPU][SLAB]) == [0]
    lines = [f"{name}, {state_arena(k)}: node 0 100.0% (plan: node 0)" for k, name in enumerate(SHARDS)]
    for line in (*lines, f"{GPU}, {SLAB}: node 0 100.0% (plan: node 0)"):
        assert line in seen["inspected"]
        assert f"good  pages           {line}" in seen["examined"]
    assert losses(placed) == losses(plain), "bit for bit"
    assert "warning" not in (placed / "logs" / "driver.log").read_text()


@pytest.mark.long
def test_each_of_two_gpu_workers_is_at_home(tmp_path: Path, ray_address: str, model: Path) -> None:
    """The first GPU on the second node, and the other way round."""
    nodes = [{"cpus": str(cpu), "memory": 0, "gpus": 1 - k} for k, cpu in enumerate(CPUS)]
    tree = settings(tmp_path / "run", model, nodes)
    tree["train"]["batch_size"], tree["hardware"]["num_gpus"] = 8, 2
    seen: dict[str, Any] = {}

    def look(job: RunContext, crew: WorkerGroup) -> None:
        seen["threads"] = {name: threads_of(crew.pids[name]) for name in (GPU, gpu_name(1))}
        seen["slab"] = policies_of(crew.pids[gpu_name(1)])[SLAB]
        seen["inspected"] = inspect_run(tmp_path / "run")[0]

    _LookingRun(tree, look).run()
    assert seen["threads"] == {GPU: {str(CPUS[1])}, gpu_name(1): {str(CPUS[0])}}
    assert seen["slab"] == {"prefer:0"}, "as the first one asked"
    for name in (GPU, gpu_name(1)):
        assert f"{name}, {SLAB}: node 0 100.0% (plan: node 0)" in seen["inspected"]
    assert "warning" not in (tmp_path / "run" / "logs" / "driver.log").read_text()


@pytest.mark.long
def test_who_follows_a_shard_that_died_comes_home(tmp_path: Path, ray_address: str) -> None:
    ready = run_spec(tmp_path, SHAPES[300_000], hardware__num_shards=2, hardware__nodes=NODES)
    with started(ready) as crew:
        before = crew.pids
        os.kill(before[SHARDS[1]], signal.SIGKILL)
        assert losses_of(crew, range(1, 3))[1] > 0
        pid = crew.pids[SHARDS[1]]
        assert pid != before[SHARDS[1]]
        assert threads_of(pid) == {str(CPUS[1])}
        assert policies_of(pid)[state_arena(1)] == {"prefer:0"}
        assert list(pages_of(pid)[state_arena(1)]) == [0]
        crew.stop()


@pytest.mark.long
def test_what_the_kernel_refuses_is_one_warning(
    tmp_path: Path, ray_address: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plan that was made for nodes that are no longer here has every call refused.

    A filter of a container does the same, but cannot be had here.
    """
    tree = settings(tmp_path / "run", model, NODES)
    tree["train"]["batch_size"], tree["hardware"]["num_gpus"] = 8, 2
    assert _ElsewhereRun(TrainConfig.model_validate(tree)).run().global_step == 3
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    [warning] = [line for line in warnings if "mbind" in line]
    assert warning.startswith("warning: the kernel does not take memory from node 60 (mbind: Invalid argument), so ")
    assert warning.count("mbind") == 1
    assert "; threads cannot be kept on CPUs 8000: " in warning, "of the second GPU worker"


class _LookingRun(TrainingRun):
    """Calls `look` when all steps are made, while every process still lives."""

    def __init__(self, tree: dict[str, Any], look: Callable[[RunContext, WorkerGroup], None]) -> None:
        super().__init__(TrainConfig.model_validate(tree))
        self._at_end = look  # type: ignore[method-assign]


class _ElsewhereRun(TrainingRun):
    def _prepare(self, *arguments: Any) -> Any:
        run_spec = super()._prepare(*arguments)
        plan = run_spec.plan
        homes = tuple(replace(home, memory=(60,)) for home in plan.shards.homes)
        nowhere = Home((1,), "8000", (60,))
        return replace(
            run_spec,
            plan=replace(
                plan,
                shards=replace(plan.shards, homes=homes),
                hosts=replace(plan.hosts, gpu_homes=(GpuHome(None, homes[1]), GpuHome(None, nowhere))),
            ),
        )
