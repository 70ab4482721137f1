"""Compares runs with gradients, state, weights or activations on disk with the same runs in memory, bit by bit.

Losses and gradient norms are compared. Runs go through the CLI and Ray, deterministic, on a GPU where there is one.

    python -m benchmarks.disk_runs OUT.json SPILL_FOLDER [--modes a,b,…] [--device cuda] [--commit ID] [key=value …]

Every mode but `memory` gets the most host memory with which its kind is on disk, by the product's own plans. `killed`:
an optimizer shard is killed in the middle of an update and replaced. `resumed`: the first half of the steps has state
on disk; the rest goes on from a save, in memory. `activations`: one long sequence, compared with `long`, which has the
same in memory. Exit code 0: all that was compared has the same bits, and each plan had on disk what its mode is about.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.kill_campaign.cases import SHARD_0
from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.phases import by_words
from benchmarks.kill_campaign.strike import Blow, strike
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import CapacityError
from megatrain_ray.machine.environment import commit, hardware, versions
from megatrain_ray.planning.run_spec import PlanningProblem, planning_problem
from tests.support.runs import command, plan_of, rows

CONFIG = Path(__file__).parent / "configs" / "speed" / "qwen2.5_0.5b.yaml"
PLENTY = 1 << 40
NEAR = 4 << 20  # a limit of host memory is found to within so many bytes
STEPS = 8
LIMIT_S = 240.0
STRIKE_S = 120.0
BASE = (
    "train.deterministic=true", "train.schedule=constant", "train.warmup_steps=0", f"train.steps={STEPS}",
    "hardware.hbm_layers=0", "hardware.num_shards=2", "spill.compression=none", "spill.io=posix",
)  # fmt: skip
LONG = ("data.seq_len=32768", "train.batch_size=1", "train.steps=3", "hardware.hbm_limit=5GB", "hardware.compile=false")
WHOLE = ("train.micro_batch_size=8", "train.accumulate=1")
# Fields of a plan that decide how results are rounded: bits are only expected to be equal where these are.
NUMERICS = (
    "step.micro_batch_size", "step.num_micro_batches",
    "compute.loss_chunk_tokens", "compute.mlp_chunk_tokens", "compute.compiled_loss",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """Describes one way to run, and which mode it must agree with.

    has: returns what the plan has on disk of the kind that the mode is about; None if nothing is on disk.
    beside: name of the mode whose losses and norms it must have.
    """

    settings: tuple[str, ...]
    has: Callable[[Plan], object] | None
    beside: str = "memory"


def _activations(plan: Plan) -> object:
    return plan.disk_activations


MODES = {
    "memory": Mode(WHOLE, None),
    "gradients": Mode(WHOLE, lambda plan: plan.gradients_on_disk),
    "state": Mode(WHOLE, lambda plan: plan.spilled_layers),
    "weights": Mode(WHOLE, lambda plan: plan.weights_on_disk),
    "packed": Mode((*WHOLE, "spill.compression=zstd"), lambda plan: plan.disk.packed and plan.spilled_layers),
    "kvikio": Mode((*WHOLE, "spill.io=kvikio"), lambda plan: plan.weights_on_disk),
    "killed": Mode(WHOLE, lambda plan: plan.spilled_layers),
    "resumed": Mode((*WHOLE, "save_every=0"), lambda plan: plan.spilled_layers),
    "long": Mode(LONG, None, "long"),
    "activations": Mode(LONG, _activations, "long"),
}


@dataclass(frozen=True)
class Found:
    """Holds what one mode's run gave. `problems`: reasons why it is not what it should be."""

    settings: tuple[str, ...]
    ram_limit_bytes: int | None
    on_disk: Mapping[str, int]
    numerics: Mapping[str, Any]
    numbers: Sequence[tuple[float, float]]  # loss and norm of each step
    step_s: float
    seconds: float
    problems: tuple[str, ...] = ()


class Runs:
    """Runs modes, each in a folder of its own."""

    def __init__(self, folder: Path, spill: Path, overrides: Sequence[str]) -> None:
        self._folder = folder
        self._run_dir = folder / "run"
        self._spill = spill
        self._overrides = overrides

    def run(self, name: str) -> Found:
        """Run a mode in a directory that is deleted afterwards."""
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            self._run_dir = Path(place) / "run"
            return self._run(name)

    def _run(self, name: str) -> Found:
        mode, start_s = MODES[name], time.monotonic()
        settings = (*BASE, *mode.settings, *self._overrides, f"run_dir={self._run_dir}")
        limit, disk = None, ()
        if mode.has is not None:
            disk = (f"spill.path={self._spill}",)
            limit = limit_for(_question((*settings, *disk)), mode.has)
            disk = (*disk, f"hardware.ram_limit={limit}")
        if name == "resumed":
            self._train(*settings, *disk, f"train.steps={STEPS // 2}")
            plan = plan_of(self._run_dir)
            self._train(*settings)
        elif name == "killed":
            self._train_and_kill(*settings, *disk)
            plan = plan_of(self._run_dir)
        else:
            self._train(*settings, *disk)
            plan = plan_of(self._run_dir)
        missing = mode.has is not None and not mode.has(plan)
        steps = rows(self._run_dir)
        return Found(
            settings, limit, on_disk(plan), {key: attrgetter(key)(plan) for key in NUMERICS},
            [(row["loss"], row["grad_norm"]) for row in steps], statistics.median(row["step_s"] for row in steps),
            time.monotonic() - start_s, ("not on disk what it is about",) if missing else (),
        )  # fmt: skip

    def _train(self, *settings: str) -> None:
        done = subprocess.run(command("train", str(CONFIG), *settings), capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {done.stderr[-1500:]}")

    def _train_and_kill(self, *settings: str) -> None:
        output = self._run_dir.with_suffix(".txt")
        run = LiveRun(command("train", str(CONFIG), *settings), self._run_dir, output)
        try:
            phase = by_words("mid-update of a layer", lambda m: m.torn(0) is not None)
            if strike(run, Blow((SHARD_0,), phase, num_updates=2), STRIKE_S) is None:
                raise RuntimeError(f"no update was met: {run.text()[-1500:]}")
            if run.process.wait(LIMIT_S) or "optimizer shard 0 died and was replaced" not in run.text():
                raise RuntimeError(f"it was not replaced: {run.text()[-1500:]}")
        finally:
            run.close()


def limit_for(question: PlanningProblem, has: Callable[[Plan], object]) -> int:
    """Return about the most host memory, to within NEAR bytes, with which `has` finds something of a plan on disk.

    Plans with more memory may have it on disk, too, where that is faster.
    """

    def lacks_room(ram_bytes: int) -> bool:
        try:
            plan = replace(question, machine=replace(question.machine, ram_bytes=ram_bytes)).plan()
        except CapacityError:
            return True
        return bool(has(plan))

    low, high = 0, question.machine.ram_bytes
    while high - low > NEAR:
        middle = (low + high) // 2
        low, high = (middle, high) if lacks_room(middle) else (low, middle)
    return low


def _question(settings: Sequence[str]) -> PlanningProblem:
    return planning_problem(load_config(CONFIG, settings).resolve())


def on_disk(plan: Plan) -> dict[str, int]:
    """Count the layers that have something on disk, by kind."""
    return {
        "gradients": len(plan.gradients_on_disk),
        "state": len(plan.spilled_layers),
        "weights": len(plan.weights_on_disk),
        "activations": sum(bool(layer.disk_activations) for layer in plan.layers),
    }


def problems(found: Found, beside: Found) -> list[str]:
    """Return the reasons why a mode is not what it should be, compared with the mode whose numbers it must have."""
    told = list(found.problems)
    if found.numerics != beside.numerics:
        told.append(f"another plan: {found.numerics}, expected {beside.numerics}")
    if found.numbers != beside.numbers:
        told.append("other losses or norms")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("spill", type=Path)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    options.spill.mkdir(parents=True, exist_ok=True)  # or limits are found for another disk than that of the runs
    found: dict[str, Found] = {}
    report = {"commit": options.commit or commit(), "hardware": hardware(options.device), "versions": versions()}
    failed = []
    with tempfile.TemporaryDirectory(prefix="disk-runs-") as folder:
        runs = Runs(Path(folder), options.spill, [f"hardware.device={options.device}", *options.overrides])
        for name in options.modes.split(","):
            try:
                each = runs.run(name)
                found[name] = replace(
                    each,
                    problems=tuple(problems(each, found[MODES[name].beside] if MODES[name].beside != name else each)),
                )
                told = found[name].problems
            except Exception as error:  # of one mode: the others still run
                told = (f"{type(error).__name__}: {error}",)
            failed += [name] if told else []
            options.out.write_text(
                json.dumps(report | {"modes": {k: asdict(f) for k, f in found.items()}, "failed": failed}, indent=1)
                + "\n"
            )
            print(f"{name:<12}", found[name].on_disk if name in found else "", *told or ("same bits",), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
