"""Measures how long `make_plan` takes, on the rows of the tables of speed and on models of several depths.

The models have 28, 80 and 180 layers of two shapes, with short and long sequences, without a disk and with one where
RAM is short by a little, by half and by most of the model.

    python -m benchmarks.plan_search OUT.json [--only TEXT] [--repeat 3] [--plans FOLDER] [--against BEFORE.json]

Seconds are processor time of the process, the best of several runs. The machine is imagined, with 16 cores and built-in
rates. For each case OUT.json has the seconds, the predicted step time and the plan's checksum. `--plans` writes the
plans into that folder. `--against` takes an OUT.json of other code, and prints which plans are different now and how
their predicted step times compare.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.rows import ALIASED, CONFIGS, ROWS
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.device.hardware_profile import TYPICAL_DISK_BYTES_PER_S
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import SpillSpace
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning.run_spec import PlanningProblem, planning_problem

HBM = "hardware.hbm_limit=141GB"
DEPTHS = 28, 80, 180
# Host memory that the machine has, as a share of what the model takes beyond processes and journals.
SHARES = {"short by little": 0.97, "short by half": 0.5, "short by most": 0.15}
LENGTHS = {"64 x 1k": (1024, 64), "2 x 32k": (32768, 2), "1 x 128k": (131072, 1)}
SHAPES = {"1b": "llama3.2_depth.yaml", "72b": "qwen2.5_72b.yaml"}
LIMIT_S = 1.0
PLENTY = 1 << 50
SPILL = SpillSpace(PLENTY, TYPICAL_DISK_BYTES_PER_S)


@dataclass(frozen=True)
class Result:
    """Holds what was measured of one case: processor seconds, and the plan's figures (None: nothing fits)."""

    case: str
    seconds: float
    step_s: float | None
    sha256: str | None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    before = _read(options.against) if options.against else {}
    results = []
    for case, question in cases(options.only):
        result, plan = measured(case, question, options.repeat)
        results.append(result)
        print(_line(result, before.get(case)), flush=True)
        if options.plans and plan:
            options.plans.mkdir(parents=True, exist_ok=True)
            (options.plans / f"{case.replace(' ', '_').replace(',', '')}.json").write_text(plan.to_json())
    options.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    slow = sum(result.seconds >= LIMIT_S for result in results)
    print(f"{slow} of {len(results)} take {LIMIT_S:g} s or longer, at most {max(r.seconds for r in results):.2f} s")
    return 0


def cases(only: str) -> Iterator[tuple[str, PlanningProblem]]:
    """Yield the cases whose names contain `only`."""
    for row, (config, *settings) in ROWS.items():
        if only in f"row {row}":
            yield f"row {row}", asked(config, *(text for text in settings if text != ALIASED))
    for shape, config in SHAPES.items():
        for depth in DEPTHS:
            for length, (seq_len, count) in LENGTHS.items():
                name = f"{shape}, {depth} layers, {length}"
                names = [name, *(f"{name}, {short}" for short in SHARES)]
                if any(only in each for each in names):
                    more = f"model.config.num_hidden_layers={depth}", f"data.seq_len={seq_len}"
                    positions = f"model.config.max_position_embeddings={seq_len}"
                    question = asked(config, *more, positions, f"train.batch_size={count}")
                    yield from ((each, of) for each, of in zip(names, _of_ram(question), strict=True) if only in each)


def asked(config: str, *settings: str) -> PlanningProblem:
    """Return the planning question of a configuration on an imagined machine."""
    path = CONFIGS / config
    device = () if "hbm_limit" in path.read_text() else (HBM,)
    question = planning_problem(load_config(path, [*device, *settings, "run_dir=nowhere"]).resolve())
    machine = replace(question.machine, num_cpus=16, num_nodes=1, nodes=(), gpus=(), profile=None)
    return replace(question, machine=replace(machine, spill=machine.spill and SPILL))


def _of_ram(question: PlanningProblem) -> Iterator[PlanningProblem]:
    """Yield the question with all the host memory that it takes and no disk, then with each share of it and a disk."""
    roomy = replace(question.machine, ram_bytes=PLENTY, spill=None)
    yield replace(question, machine=roomy)
    plan = replace(question, machine=roomy).plan()
    fixed = sum(
        row.num_bytes for row in plan.memory_items if row.tier is Tier.HOST and row.name in ("processes", "journals")
    )
    of_model = plan.total_bytes(Tier.HOST) - fixed
    # If all of the model lives on the device it takes no host memory: count what it would take there.
    of_model = max(of_model, plan.precision.element_bytes * plan.num_trained)
    for share in SHARES.values():
        yield replace(question, machine=replace(roomy, ram_bytes=fixed + int(share * of_model), spill=SPILL))


def measured(case: str, question: PlanningProblem, repeat: int) -> tuple[Result, Plan | None]:
    """Plan `repeat` times; return the result with the shortest time, and the plan, or None if nothing fits."""
    seconds, plan = math.inf, None
    for _ in range(repeat):
        start_s = time.process_time()
        try:
            plan = replace(question).plan()  # a question knows its plan from then on
        except CapacityError:
            plan = None
        seconds = min(seconds, time.process_time() - start_s)
    if plan is None:
        return Result(case, seconds, None, None), None
    assert plan.prediction is not None
    return Result(case, seconds, plan.prediction.step_s, plan.sha256), plan


def _read(path: Path) -> dict[str, Result]:
    return {tree["case"]: Result(**tree) for tree in json.loads(path.read_text())}


def _line(result: Result, before: Result | None) -> str:
    step = "nothing fits" if result.step_s is None else f"{result.step_s:.2f} s a step"
    line = f"{result.case:42} {result.seconds:6.2f} s   {step}"
    if before is None:
        return line
    line += f"   before {before.seconds:.2f} s"
    if result.sha256 == before.sha256:
        return line
    if result.step_s is None or before.step_s is None:
        return f"{line}, which fitted: {before.step_s is not None}"
    return f"{line}, another plan: {result.step_s / before.step_s - 1:+.3%} of a step"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
