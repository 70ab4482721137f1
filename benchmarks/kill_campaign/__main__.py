"""Kills real runs from outside, phase by phase, and compares what they become with runs that nobody killed.

    python -m benchmarks.kill_campaign OUT.json [--seed N] [--random N] [--only TEXT ...]

It runs on the CPU, and needs py-spy beside the interpreter. Cases are in cases.py, checks in checks.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.kill_campaign.cases import SAVE_KEEP, Case, Variant, table
from benchmarks.kill_campaign.chain import RUN_S, Chain, Result
from benchmarks.kill_campaign.checks import OK, Undisturbed
from benchmarks.kill_campaign.exports import kill_exports
from tests.support.runs import ROOT, command, config, write_config

NUM_BLOCKS = 3
# Wide and shallow: a layer's update and a save's blobs take milliseconds, which is long enough to be met.
SHAPE = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 384, "intermediate_size": 1152,
    "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
NUM_ATTEMPTS = 3  # tries of a case whose phase does not come
CHAIN_KILLS = 15  # results of one chain, after which its run is left alone until its end and compared
NUM_CHAINS = 100  # at most, for each variant


def configure(folder: Path, variant: Variant) -> Path:
    folder.mkdir(parents=True)
    changes = {"data__seq_len": 64, "hardware__num_shards": 2, "save_every": 5, "max_failures": 1000}
    changes["save_keep"] = SAVE_KEEP
    return write_config(folder / "config.yaml", config(folder / "run", SHAPE, **changes | variant.changes))


def undisturbed(folder: Path, variant: Variant) -> Undisturbed:
    path = configure(folder, variant)
    done = subprocess.run(command("train", str(path)), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode:
        sys.exit(f"the undisturbed run failed: {done.stderr[-2000:]}")
    return Undisturbed.of(folder / "run", folder / "exported")


def kill_training(folder: Path, variant: Variant, cases: Sequence[Case], expected: Undisturbed) -> Iterator[Any]:
    """Yield results of cases, verdicts of chains after their last kill, and a sentence for each missed case."""
    queue, tries = list(cases), dict.fromkeys((case.name for case in cases), 0)
    for number in range(NUM_CHAINS):
        if not queue:
            return
        place = folder / f"{variant.name.lower()}_{number}"
        chain = Chain(place, configure(place, variant), expected)
        while len(chain.results) < CHAIN_KILLS and (case := chain.possible(queue)) and not chain.over:
            result = chain.perform(case)
            if case in queue:
                queue.remove(case)
                tries[case.name] += 1
            if result is not None:
                yield result
                if result.case == case.name:
                    continue
            if tries.get(case.name, NUM_ATTEMPTS) < NUM_ATTEMPTS:
                queue.append(case)
            else:
                yield f"{variant.name}: the phase of {case.name} did not come"
        yield {"chain": place.name, "kills": [result.case for result in chain.results], "checks": chain.finish()}
    for case in queue:
        yield f"{variant.name}: {case.name} is left over after {NUM_CHAINS} chains"


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    report = Report(options.out, options.seed)
    try:
        for variant in Variant:
            cases = [case for case in all_cases(options, 0) if case.variant is variant]
            exports = variant is Variant.CLIPPED and bool({"", "export"} & set(options.only))
            if not cases and not exports:
                continue
            expected = undisturbed(folder / variant.name, variant)
            cases = [case for case in all_cases(options, expected.save_bytes) if case.variant is variant]
            for found in kill_training(folder, variant, cases, expected):
                report.add(found)
            if exports:
                place = folder / variant.name
                for found in kill_exports(place / "run", place, expected.digest, expected.master_bytes):
                    report.add(found)
    finally:
        report.write()
    if report.problems:
        print(f"{len(report.problems)} problems; the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def all_cases(options: argparse.Namespace, save_bytes: int) -> list[Case]:
    source = random.Random(options.seed)
    cases = table(source, NUM_BLOCKS + 2, save_bytes, options.random)
    return [case for case in cases if any(text in f"{case.variant.name}/{case.name}" for text in options.only)]


class Report:
    """Collects what was found, and writes the report anew after every case."""

    def __init__(self, out: Path, seed: int) -> None:
        self._out = out
        self._start_s = time.monotonic()
        self._head = {
            "seed": seed, "cores": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version(),
            "torch": torch.__version__, "ray": ray.__version__, "commit": _commit(),
        }  # fmt: skip
        self._results: list[Result] = []
        self._chains: list[dict[str, Any]] = []
        self._missed: list[str] = []

    def add(self, found: Any) -> None:
        if isinstance(found, Result):
            self._results.append(found)
            print(f"{found.seconds:6.1f} s  {found.case}: {'; '.join(found.problems) or OK}", flush=True)
        elif isinstance(found, dict):
            self._chains.append(found)
            print(f"          {found['chain']}: {found['checks']}", flush=True)
        else:
            self._missed.append(found)
            print(f"          {found}", flush=True)
        self.write()

    @property
    def problems(self) -> list[str]:
        found = [f"{result.case}: {problem}" for result in self._results for problem in result.problems]
        for chain in self._chains:
            found += [f"{chain['chain']}: {name}: {v}" for name, v in chain["checks"].items() if v != OK]
        return found + self._missed

    def write(self) -> None:
        summary = {
            "kills": sum(len(hit.pids) for result in self._results for hit in result.hits),
            "cases": len(self._results), "problems": self.problems, "wall_s": round(time.monotonic() - self._start_s),
        }  # fmt: skip
        results = [{**asdict(result), "problems": result.problems} for result in self._results]
        tree = {"summary": summary, **self._head, "cases": results, "chains": self._chains}
        self._out.write_text(json.dumps(tree, indent=1))


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_campaign", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=16, help="kills at random moments, on top of the named ones")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT",
        help="cases whose name (VARIANT/ROLE/PHASE) holds one of these; export: only those",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
