"""`megatrain bench`, once as a user has it, and its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_ray.bench.bench_config import BenchOptions, bench_config
from megatrain_ray.bench.bench_report import print_table
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.machine import environment
from megatrain_ray.machine.process_memory import GpuMemoryUse, device_memory, pss
from megatrain_ray.machine.subprocess_call import in_own_process
from megatrain_ray.model.open_model import open_model
from tests.support.in_process import Actors
from tests.support.runs import ROOT, cli, cli_here, config, write_config
from tests.support.tiny import VOCAB_SIZE

OPTIONS = BenchOptions(warmup=1, steps=3)
MODEL = {
    "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
EXPOSED = {"h2d", "d2h", "optimizer", "host_accumulation", "loss", "data", "python"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, actors: Actors) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    tree = config(
        folder / "run", MODEL, train__batch_size=4, train__micro_batch_size=2, train__accumulate=2,
        train__warmup_steps=9, train__precision="bf16", hardware__num_shards=2, save_every=2,
    )  # fmt: skip
    file = str(write_config(folder / "bench.yaml", tree))
    with actors():
        done = cli_here("bench", file, "--json", "--compare-in-process", "--warmup=1", "--steps=3")
    assert done.returncode == 0, done.stderr
    assert not (folder / "run").exists(), "the run directory of the file may hold a run"
    return dict(json.loads(done.stdout))


def test_steps(report: dict[str, Any]) -> None:
    measured = sorted(report["all_step_s"][1:4])
    assert (report["warmup"], report["steps"], len(report["all_step_s"])) == (1, 3, 5)
    spread = (measured[2] - measured[0]) / measured[1]
    expected = {"median": measured[1], "min": measured[0], "max": measured[2], "spread": spread}
    assert report["step_s"] == pytest.approx(expected)
    assert report["tokens_per_s"] == pytest.approx(4 * 32 / measured[1])
    assert 0 < report["busy_share"] <= 1
    assert set(report["exposed_s"]) == EXPOSED
    assert all(5 < loss < 6 for loss in report["losses"])


@pytest.mark.long
def test_without_a_trace_there_is_no_further_step(tmp_path: Path, ray_address: str) -> None:
    file = str(write_config(tmp_path / "bench.yaml", config(tmp_path / "other", MODEL)))
    lengths = ("--warmup=0", "--steps=1", "--no-ceiling", "--no-trace")
    done = cli("bench", file, "--json", *lengths, f"run_dir={tmp_path / 'run'}", RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (len(found["all_step_s"]), found["busy_share"]) == (1, None)
    assert not list((tmp_path / "run").glob("trace*"))


def test_ceiling_and_comparison(report: dict[str, Any]) -> None:
    ceiling, compared = report["ceiling"], report["in_process"]
    assert [trial["micro_batch_size"] for trial in ceiling["trials"]] == [2, 4]
    assert ceiling["ratio"] == pytest.approx(report["model_tflops"] / ceiling["model_tflops"])
    assert compared["same_losses"]
    slower = 100 * (report["step_s"]["median"] / compared["step_s"]["median"] - 1)
    assert compared["run_is_slower_by_percent"] == pytest.approx(slower)


def test_memory_state_and_traffic(report: dict[str, Any], actors: Actors) -> None:
    memory, num_parameters = report["memory"], report["plan"]["num_parameters"]
    assert memory["hbm_bytes"] is None
    assert memory["hbm_reason"] == "the device is the CPU"
    processes = memory["pss_bytes_by_process"]
    names = {"optimizer shard 0", "optimizer shard 1"}
    if actors is nullcontext:
        assert set(processes) == {"driver", "GPU worker", "data", "arena owner", "Ray", *names}
    assert memory["pss_bytes"] == sum(sum(kinds.values()) for kinds in processes.values())
    assert memory["pss_bytes"] > memory["arena_bytes"] > 12 * num_parameters
    assert report["state_share"] == {"hbm": 0.0, "host": 1.0, "nvme": 0.0}
    moved = report["bytes_per_parameter"]
    assert 2 < moved["h2d"] < 8
    assert 4 <= moved["d2h"] < 5  # FP32 sums of two micro-batches, padded
    assert report["optimizer"]["kernels"]
    assert report["optimizer"]["num_shards"] == 2
    shards = report["optimizer"]["shards"]
    assert sum(shard["num_parameters"] for shard in shards) == num_parameters
    assert all(shard["parameters_per_s"] > 0 and shard["nodes"] is shard["cpus"] is None for shard in shards)


def test_surroundings_and_settings(report: dict[str, Any]) -> None:
    assert report["versions"]["torch"] == version("torch")
    assert report["hardware"]["gpu"] is None
    assert report["hardware"]["cores"] == len(os.sched_getaffinity(0))
    train = report["config"]["train"]
    assert (train["steps"], train["batch_size"], train["warmup_steps"], train["schedule"]) == (5, 4, 0, "constant")
    assert report["config"]["save_every"] is None
    assert report["plan"]["step"]["micro_batch_size"] == 2
    assert report["plan"]["activations"] == {"keep": 4}


def test_the_plan_that_was_compared_is_the_one_before_step_1(report: dict[str, Any], actors: Actors) -> None:
    compared = report["comparison"]
    assert compared["plan_sha256"] == report["plan_sha256"]
    assert (compared["first_step"], compared["last_step"]) == (1, 5)
    terms = {term["name"]: term for term in compared["terms"]}
    assert terms["step"]["predicted"] == report["prediction"]["step_s"]
    if actors is nullcontext:
        assert terms["host"]["measured"] > report["memory"]["arena_bytes"]
    assert 0 < terms["updates"]["measured"] < report["all_step_s"][0]
    assert report["prediction"]["profile"]["version"] == 1


def test_the_table(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_table(report)
    out = capsys.readouterr().out
    for name in ("step", "speed", "ceiling", "one process", "waited", "memory", "state", "AdamW", "of each", "plan"):
        assert f"\n{name} " in f"\n{out}"
    shard = {"nodes": [1], "cpus": "4-7", "num_parameters": 2_000_000, "parameters_per_s": 3e9}
    shards = [shard, shard | {"nodes": None, "cpus": None, "parameters_per_s": None}]
    print_table(report | {"optimizer": report["optimizer"] | {"shards": shards}})
    shown = " ".join(capsys.readouterr().out.split())
    assert "shard 0 (node 1) 3.00B parameters/s of 2.00M; shard 1 no updates of 2.00M" in shown
    predicted = {"step_s": 1.1 * report["step_s"]["median"]}
    print_table(report | {"in_process": None, "ceiling": {"model_tflops": None}, "prediction": predicted})
    out = capsys.readouterr().out
    assert "by the plan (+10.0%)" in out
    assert "one process" not in out
    assert "do not fit the device" in out
    assert "the disk" not in out
    print_table(report | {"bytes_per_parameter": {"h2d": 1.0, "d2h": 2.0, "disk": 20.5}})
    assert "in and 2 out, 20.5 from and to the disk" in " ".join(capsys.readouterr().out.split())
    for ratio, told in ((1.01, False), (1.2, True)):
        print_table(report | {"ceiling": {"model_tflops": 2.0, "micro_batch_size": 1, "ratio": ratio}})
        shown = " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal
        assert ("something else used the machine" in shown) is told


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["train.steps=5"], OPTIONS, "train.steps: a benchmark sets it itself"),
        (["log.wandb=mine"], OPTIONS, "log.wandb: a benchmark sets it itself"),
        ([], BenchOptions(-1, 3), "--warmup -1"),
        ([], BenchOptions(2, 0), "--steps 0"),
        (
            ["hardware.num_gpus=2", "train.accumulate=2"],
            BenchOptions(1, 1, compare_in_process=True),
            "hardware.num_gpus: 2, and one process works on one GPU; leave --compare-in-process out",
        ),
    ],
)
def test_what_a_benchmark_sets_itself(
    tmp_path: Path, overrides: list[str], options: BenchOptions, message: str
) -> None:
    file = write_config(tmp_path / "bench.yaml", config(tmp_path / "run", MODEL))
    with pytest.raises(ConfigError, match=message):
        bench_config(file, overrides, options, tmp_path / "other")


def test_the_run_directory(tmp_path: Path) -> None:
    file = write_config(tmp_path / "bench.yaml", config(tmp_path / "run", MODEL))
    assert bench_config(file, [], OPTIONS, tmp_path / "a: b").run_dir == str(tmp_path / "a: b")
    assert bench_config(file, ["run_dir=here"], OPTIONS, tmp_path / "other").run_dir == "here"


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("qwen2.5_3.1b", 3_085_938_688), ("qwen2.5_7.6b", 7_615_616_512), ("qwen2.5_14.8b", 14_770_033_664),
     ("qwen2.5_32.8b", 32_763_876_352), ("qwen2.5_72b", 72_706_203_648), ("llama3.2_depth", 1_965_672_448)],
)  # fmt: skip
def test_the_configurations_have_the_sizes_of_their_names(name: str, num_parameters: int) -> None:
    options = BenchOptions(2, 8)
    settings = bench_config(ROOT / "benchmarks/configs/speed" / f"{name}.yaml", [], options, Path("run"))
    model = build_empty(open_model(settings.model).factory, torch.bfloat16)
    model.tie_weights()  # type: ignore[operator]  # of every PreTrainedModel
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert settings.data.seq_len * (settings.train.batch_size or 0) == 64 * 1024


def test_the_example_is_one() -> None:
    assert load_config(ROOT / "examples" / "bench.yaml").save_every is None


def test_a_function_in_its_own_process() -> None:
    assert in_own_process("it", os.getpid) != os.getpid()
    with pytest.raises(ConfigError, match="no such file"):
        in_own_process("it", load_config, Path("no such file"))
    with pytest.raises(MegatrainError, match=r"^it died"):
        in_own_process("it", os._exit, 3)


def test_the_memory_of_a_process() -> None:
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert pss(os.getpid())["private"] > held.nbytes


class FakeNvml:
    """Stands in for NVML. `processes`: bytes by pid, for each GPU."""

    def __init__(self, *processes: dict[int, int | None]) -> None:
        self._processes = processes
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: len(processes)
        self.nvmlDeviceGetHandleByIndex = int

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._processes[index].items()]


@pytest.mark.parametrize(
    ("nvml", "num_bytes", "reason"),
    [
        (FakeNvml({7: 100}, {8: 200}), 100, None),
        (FakeNvml({1: 300}, {}), 300, "another pid"),
        (FakeNvml({1: 300, 2: 400}), None, "2 processes"),
        (FakeNvml({7: None}), None, "0 processes"),
        (None, None, "not installed"),
    ],
)
def test_the_memory_of_a_gpu(
    nvml: FakeNvml | None, num_bytes: int | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    memory = device_memory(7)
    assert memory.num_bytes == num_bytes
    assert memory == GpuMemoryUse(num_bytes) if reason is None else reason in str(memory.reason)


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(file))
    assert environment.commit() is None
    file.write_text("")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit = environment.commit()
    assert commit is not None
    assert len(commit) == 40
    file.write_text("changed")
    assert environment.commit() == f"{commit}+"
