"""Compares runs on several GPUs, and on as many hosts with one GPU each, with the same run on one GPU.

    python -m benchmarks.several_gpus OUT.json [--modes a,b,…] [--gpus 2] [--close 1e-6] [--device cuda] [key=value …]

`whole`: each GPU uploads whole layers. `parts`: each GPU uploads its part and gets the rest by an all-gather. `again`:
    the same once more. `hosts`: two Ray nodes of this machine, each with one of two GPUs. `sockets`: the same, with
    everything that these exchange on the loopback, as it would be on a network. Runs go through the CLI and Ray. They
    train four layers of Qwen2.5-0.5B's shape in FP32, deterministic, two of them on the devices. Exit code 0: losses
    and norms of each are as close to one GPU's as `--close` says, and those of `parts` and `again` have the bits of
    `whole`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatrain_ray.machine.environment import commit, hardware, versions
from tests.support.ray_nodes import ray_nodes
from tests.support.runs import command, plan_of, rows

CONFIG = Path(__file__).parent / "configs" / "speed" / "qwen2.5_0.5b.yaml"
CLOSE = 1e-6
LIMIT_S = 200.0
SECOND = "127.0.0.2"
BASE = (
    "model.config.num_hidden_layers=4", "data.seq_len=128", "train.micro_batch_size=2", "train.steps=8",
    "train.precision=fp32", "train.deterministic=true", "train.schedule=constant", "train.warmup_steps=0",
    "hardware.hbm_layers=2",
)  # fmt: skip
MODES: Mapping[str, tuple[str, ...]] = {
    "one": (),
    "whole": ("hardware.all_gather=false",),
    "parts": ("hardware.all_gather=true",),
    "again": ("hardware.all_gather=true",),
    "hosts": (),
    "sockets": (),
}
OF_HOSTS = "hosts", "sockets"
BY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
SAME_BITS = "parts", "again"  # as `whole`
Numbers = Sequence[tuple[float, float]]  # loss and norm of each step


@dataclass(frozen=True)
class Found:
    """Holds what one mode's run gave. `worst`: the largest difference from `one`, relative."""

    settings: tuple[str, ...]
    gathers_slots: bool
    numbers: Numbers
    step_s: float
    worst: float
    problems: tuple[str, ...]


@contextmanager
def _surroundings(name: str, device: str) -> Iterator[Mapping[str, str]]:
    """Yield the environment variables of a run, after starting the cluster that it needs."""
    if name not in OF_HOSTS:
        yield os.environ
        return
    common = BY_SOCKETS if name == "sockets" else {}
    first, second = (common | ({"CUDA_VISIBLE_DEVICES": str(i)} if device == "cuda" else {}) for i in range(2))
    count = f"--num-gpus={int(device == 'cuda')}"
    with ray_nodes(count, **first) as nodes:
        nodes.join(SECOND, count, **second)
        # The driver's machine has one GPU, too.
        yield {**nodes.environment, "RAY_ADDRESS": nodes.address, **first}


def run(name: str, settings: Sequence[str], device: str) -> tuple[bool, Numbers, float]:
    """Return whether slots were gathered, losses and norms, and the median of the steps' seconds."""
    with tempfile.TemporaryDirectory(prefix="several-gpus-") as folder, _surroundings(name, device) as environment:
        run_dir = Path(folder) / "run"
        arguments = command("train", str(CONFIG), *settings, f"run_dir={run_dir}", f"hardware.device={device}")
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {done.stderr[-3000:]}")
        steps = rows(run_dir)
        numbers = [(row["loss"], row["grad_norm"]) for row in steps]
        return plan_of(run_dir).slots.gathered, numbers, statistics.median(row["step_s"] for row in steps)


def problems(name: str, numbers: Numbers, worst: float, close: float, earlier: Mapping[str, Found]) -> list[str]:
    """Return the reasons why a mode is not what it should be. `close`: how far its numbers may be from one GPU's."""
    told = [] if worst <= close else [f"differs by {worst:.2g}"]
    if name in SAME_BITS and list(numbers) != list(earlier["whole"].numbers):
        told.append("other bits than whole uploads")
    return told


def difference(numbers: Numbers, beside: Numbers) -> float:
    """Return the largest relative difference; NaN if one of the numbers is NaN."""
    pairs = (pair for of_step in zip(numbers, beside, strict=True) for pair in zip(*of_step, strict=True))
    return max((abs(a / b - 1) for a, b in pairs), key=lambda share: (math.isnan(share), share))


def settings_of(name: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings of a mode: four sequences an update for each GPU, however they are split."""
    is_of_hosts = name in OF_HOSTS
    count = 2 if is_of_hosts else 1 if name == "one" else options.gpus
    of_hosts = ("hardware.num_hosts=2",) if is_of_hosts else ()
    share = (f"hardware.num_gpus={count}", f"train.batch_size={4 * options.gpus}")
    split = (f"train.accumulate={2 * options.gpus // count}",)
    return (*BASE, *share, *split, *of_hosts, *MODES[name], *options.overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--close", type=float, default=CLOSE)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    names = options.modes.split(",")
    if names[0] != "one" or any("whole" not in names[: names.index(name)] for name in SAME_BITS if name in names):
        parser.error("--modes: the first is one, and whole comes before parts and again, which are compared with these")
    report = {"commit": options.commit or commit(), "hardware": hardware(options.device), "versions": versions()}
    found: dict[str, Found] = {}
    failed = {}
    for name in names:
        settings, worst = settings_of(name, options), math.nan
        try:
            gathers, numbers, step_s = run(name, settings, options.device)
            worst = difference(numbers, numbers if name == "one" else found["one"].numbers)
            told = problems(name, numbers, worst, options.close, found)
            found[name] = Found(settings, gathers, numbers, step_s, worst, tuple(told))
        except KeyError as missing:
            told = [f"there is no run of {missing} to compare with"]
        except Exception as error:  # of one mode: the others still run
            told = [f"{type(error).__name__}: {error}"]
        if told:
            failed[name] = told
        modes = {key: asdict(each) for key, each in found.items()}
        options.out.write_text(json.dumps(report | {"modes": modes, "failed": failed}, indent=1) + "\n")
        print(f"{name:<8} worst {worst:.2g}", *told, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
