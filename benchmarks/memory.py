"""Measures the host memory of a run by size of the model: the slope is what a parameter costs, the rest is fixed.

    python -m benchmarks.memory OUT.json

Two models with the same shape of layers, of about 100 and 300 million parameters, train a few steps on the CPU device.
PSS of every process is read from the kernel. Memory that the CPU device holds in place of a GPU's is counted
separately.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.crew.ray_cluster import cluster
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.machine.process_memory import pss
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.workers.messages import Progress

ROOT = Path(__file__).parent.parent
NUM_LAYERS = (6, 20)
STEPS = 3


def run_spec(folder: Path, num_layers: int) -> RunSpec:
    """Prepare a run of a model with 14.2M parameters a layer and 21M in embedding and head."""
    model = {
        "model_type": "llama", "vocab_size": 10240, "hidden_size": 1024, "intermediate_size": 3328,
        "num_hidden_layers": num_layers, "num_attention_heads": 16, "num_key_value_heads": 16,
    }  # fmt: skip
    tree = {
        "model": {"config": model},
        "data": {"path": str(ROOT / "examples/data/tinyshakespeare.txt"), "tokenizer": "bytes", "seq_len": 64},
        "train": {"steps": STEPS, "micro_batch_size": 1, "precision": "bf16"},
        "hardware": {"device": "cpu", "num_shards": 2},
        "run_dir": str(folder / "run"),
    }
    return prepare(TrainConfig.model_validate(tree).resolve())


def measure(num_layers: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        ready = run_spec(Path(folder), num_layers)
        crew = WorkerGroup(ready)
        try:
            crew.start(data_arguments(ready))
            crew.load(None, None)
            crew.begin(lambda: Progress(0, 0))
            rows = [run_step(crew, step) for step in range(1, STEPS + 1)]
            processes = {name: pss(pid) for name, pid in crew.pids.items()}
            crew.stop()
        finally:
            crew.kill()
    return {
        "parameters": sum(layer.num_parameters for layer in ready.plan.layers),
        "arenas": rows[-1]["host_bytes"],
        "slab": ready.plan.gradients.slab_bytes,
        "simulated_hbm_planned": ready.plan.total_bytes(Tier.HBM),
        "simulated_hbm_peak": rows[-1]["hbm_peak_bytes"],
        "processes": processes,
        "losses": [row["loss"] for row in rows],
    }


def run_step(crew: WorkerGroup, step: int) -> Mapping[str, Any]:
    call = crew.step(step, save=False)
    while not crew.wait([call], 1.0):
        time.sleep(0)
    row: Mapping[str, Any] = ray.get(call).row
    return row


def data_arguments(ready: RunSpec) -> dict[str, Any]:
    config, vocab_size = ready.config, ready.structure.vocab_size
    return {
        "data": config.data,
        "tokens": tokenize(config.data, config.tokenizer, vocab_size, Path(config.run_dir)),
        "vocab_size": vocab_size,
        "batch_size": 1,
        "step": 0,
        "position": None,
    }


def slopes(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes per parameter of each kind of memory. Buffered gradients are counted separately."""
    more = large["parameters"] - small["parameters"]

    def total(run: Mapping[str, Any], kind: str) -> int:
        return sum(process[kind] for process in run["processes"].values())

    def slope(of_large: float, of_small: float) -> float:
        return (of_large - of_small) / more

    worker = [run["processes"]["GPU worker"]["private"] for run in (large, small)]
    gradients = slope(large["slab"], small["slab"])
    return {
        "arenas_without_gradients": slope(large["arenas"] - large["slab"], small["arenas"] - small["slab"]),
        "gradients_in_waiting": gradients,
        "shared_pss_without_gradients": slope(total(large, "shared"), total(small, "shared")) - gradients,
        "private_pss_but_gpu_worker": slope(total(large, "private"), total(small, "private")) - slope(*worker),
        "private_pss_of_gpu_worker": slope(*worker),
        "simulated_hbm_planned": slope(large["simulated_hbm_planned"], small["simulated_hbm_planned"]),
    }


def main() -> None:
    with cluster(num_cpus=4, num_gpus=0):
        small, large = (measure(num_layers) for num_layers in NUM_LAYERS)
    fixed = {name: process["private"] + process["files"] for name, process in small["processes"].items()}
    report = {"slopes": slopes(small, large), "fixed_private_and_files": fixed, "runs": [small, large]}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1))
    print(json.dumps(report["slopes"], indent=1))


if __name__ == "__main__":
    main()
