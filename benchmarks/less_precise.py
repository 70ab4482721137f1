"""Measures what settings that are less precise than plain PyTorch do to the loss of a model, the demo's by default.

It is trained plainly, with layers in FP8 (train.compute: fp8), with bf16 moments rounded stochastically (train.moments:
bf16), and with bf16 moments rounded to nearest.

    python -m benchmarks.less_precise OUT.json [--seeds 0,1] [--kinds plain,fp8,…] [--config FILE] [--commit ID]
        [key=value …]

Everything runs in one process, on the same batches. A seed is that of the weights, of the data's order and of the
rounding. `again` is plain once more in micro-batches of half the size, which is the same mathematics rounded
differently: gaps no larger than its own mean nothing. Compared are the mean losses of the last 50 steps, in which data
may repeat.

Layers in FP8 beside bf16, 500 steps of 0.5 billion parameters, on a GPU of compute capability 8.9:

    python -m benchmarks.less_precise OUT.json --config benchmarks/configs/speed/qwen2.5_0.5b.yaml \\
        --kinds plain,fp8,again --seeds 0 hardware.device=cuda train.steps=500 train.batch_size=8 train.warmup_steps=50
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatrain_ray.bench.in_process import run_in_process
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import config_to_dict, load_config
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.engine.optimizer import update_kernel
from megatrain_ray.engine.optimizer.adamw import AdamWConstants, UpdateParams
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.undo_log import ParamSlice, Transaction
from megatrain_ray.machine.environment import commit, hardware, versions
from megatrain_ray.planning.run_spec import prepare

CONFIG = Path("examples/tiny_llama.yaml")
LAST = 50
CPU = ("hardware.device=cpu",)  # unless overrides say otherwise
KINDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "fp8": ("train.compute=fp8",),
    "moments": ("train.moments=bf16",),
    "nearest": ("train.moments=bf16",),
    "again": (),  # and half the micro-batches of plain
}


class Nearest(TorchBlocks):
    """Updates moments widened to FP32 with the torch kernel, and then rounds them to nearest bf16."""

    def __init__(self, num_threads: int, hyper: AdamWConstants) -> None:
        super().__init__(num_threads, hyper)

    def update(
        self, parts: Sequence[ParamSlice], gradient: Tensor, params: UpdateParams, transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:  # fmt: skip
        wide = [part._replace(state=part.state._replace(m=part.state.m.float(), v=_wide(part))) for part in parts]
        super().update(wide, gradient, params, None, directions)
        for part, updated in zip(parts, wide, strict=True):
            for narrow, value in zip(part.state[2:], updated.state[2:], strict=True):
                if narrow is not None and value is not None:
                    narrow.copy_(value)


def _wide(part: ParamSlice) -> Tensor | None:
    return None if part.state.v is None else part.state.v.float()


def train(config: TrainConfig, *, to_nearest: bool) -> list[dict[str, Any]]:
    """Train, and return the metrics rows of all steps. `to_nearest`: round moments to nearest, not stochastically."""
    run_spec = prepare(config)
    tokens = tokenize(config.data, config.tokenizer, run_spec.structure.vocab_size, Path(config.run_dir))
    rounding = patch.object(update_kernel, "_proven", lambda hyper, candidates: Nearest)
    with rounding if to_nearest else nullcontext():
        return run_in_process(run_spec, tokens)


def measure(kind: str, seed: int, file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        seeds = (f"model.seed={seed}", f"data.seed={seed}", f"train.seed={seed}")
        settings = (*CPU, *overrides, *KINDS[kind], *seeds, f"run_dir={folder}/run")
        batch_size = load_config(file, settings).resolve().train.batch_size
        parts = 2 if kind == "again" else 1
        split = f"train.micro_batch_size={(batch_size or 1) // parts}", f"train.accumulate={parts}"
        config = load_config(file, (*settings, *split)).resolve()
        start_s = time.perf_counter()
        rows = train(config, to_nearest=kind == "nearest")
    losses = [row["loss"] for row in rows]
    return {
        "kind": kind,
        "seed": seed,
        "last": statistics.mean(losses[-LAST:]),
        "seconds": time.perf_counter() - start_s,
        "losses": losses,
        "config": {key: value for key, value in config_to_dict(config).items() if key != "run_dir"},
    }


def gaps(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how much higher the mean of the last losses is than that of the plain run, by kind and seed."""
    plain = {run["seed"]: run["last"] for run in runs if run["kind"] == "plain"}
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        if run["kind"] != "plain" and run["seed"] in plain:
            found.setdefault(run["kind"], {})[str(run["seed"])] = run["last"] - plain[run["seed"]]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--commit")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    report: dict[str, Any] = {
        "commit": options.commit or commit(),
        "hardware": hardware(load_config(options.config, [*CPU, *options.overrides]).resolve().hardware.device),
        "versions": versions(),
        "config": str(options.config),
        "overrides": options.overrides,
        "threads": torch.get_num_threads(),
        "runs": [],
    }
    for seed in map(int, options.seeds.split(",")):
        for kind in options.kinds.split(","):
            found = measure(kind, seed, options.config, options.overrides)
            report["runs"].append(found)
            report["gaps"] = gaps(report["runs"])
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"seed {seed}, {kind:<8} {found['last']:.4f} in {found['seconds']:.0f} s", flush=True)
    for kind, by_seed in report["gaps"].items():
        print(f"{kind:<8} {', '.join(f'{gap:+.4f}' for gap in by_seed.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
