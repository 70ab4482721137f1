"""Losses of 50 steps against plain PyTorch on the same machine, in every mode that a row of results uses.

python -m benchmarks.parity OUT.json [--commit HASH] [--steps 50] [--config FILE] [--modes a,b,…] [key=value …]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity_modes import MODES, Common, Mode, summary
from benchmarks.plain_training import Grouping, Numbers, check_settings, train_plain
from megatrain_ray.config import TrainConfig
from megatrain_ray.config_file import config_to_dict, load_config
from megatrain_ray.data_worker import DataWorker
from megatrain_ray.engine import compiled_call
from megatrain_ray.errors import ConfigError
from megatrain_ray.gpu_worker import make_device
from megatrain_ray.in_process import run_in_process
from megatrain_ray.io.batches import Batch
from megatrain_ray.planning import Prepared
from megatrain_ray.surroundings import commit, hardware, versions
from megatrain_ray.tokenizing import tokenize

CONFIG = Path(__file__).parent / "configs" / "speed" / "qwen2.5_0.5b.yaml"
TOLERANCES = {"bf16": 2e-2, "fp32": 1e-4}


class PlainRuns:
    """Plain trainings of a configuration, each made when it is first asked for."""

    def __init__(self, common: Common, batches: Sequence[Batch]) -> None:
        self._common = common
        self._batches = batches
        self._made: dict[tuple[Grouping, float | None], Numbers] = {}

    def of(self, prepared: Prepared, *, compiled: bool = False) -> Numbers:
        """In the micro-batches, and with the clipping, of such a run."""
        grouping = Grouping(prepared.plan.micro_batch_size, compiled)
        key = grouping, prepared.config.train.clip
        if key not in self._made:
            forget()
            common = self._common
            device = make_device(prepared.plan, deterministic=prepared.config.train.deterministic)
            self._made[key] = train_plain(
                prepared.config, common.source, common.structure, common.source.drawn, self._batches, grouping, device
            )
            device.close()
        return self._made[key]


def run_mode(common: Common, mode: Mode, prepared: Prepared, tokens: Sequence[Path]) -> tuple[Numbers, list[str]]:
    """Also why it was not in that mode, a line each."""
    forget()
    with what_is_uncompiled() as uncompiled:
        rows = run_in_process(prepared, tokens)
    skipped = [f"step {row['step']} was skipped" for row in rows if row["skipped"]]
    numbers = Numbers(tuple(row["loss"] for row in rows), tuple(row["grad_norm"] for row in rows))
    return numbers, [*common.problems(mode, prepared.plan), *uncompiled, *skipped]


def forget() -> None:
    """What the run before left in the compiler and on the device."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def what_is_uncompiled() -> Iterator[list[str]]:
    """Says, after the block, which functions were to be compiled and ran as they are: a line each."""
    heard: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(compiled_call.__name__)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def compare(ours: Numbers, theirs: Numbers, tolerance: float) -> dict[str, Any]:
    """Losses step by step, and the gradients' norms in shares of theirs. A loss that is no number is not within."""
    differences = [a - b for a, b in zip(ours.losses, theirs.losses, strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(ours.grad_norms, theirs.grad_norms, strict=True)]
    return {
        "within": all(abs(difference) <= tolerance for difference in differences),
        "greatest": max(map(abs, differences)),
        "mean": statistics.fmean(map(abs, differences)),
        "same_losses": ours.losses == theirs.losses,
        "same_grad_norms": ours.grad_norms == theirs.grad_norms,
        "greatest_of_grad_norms": max(norms),
        "differences": differences,
        **asdict(ours),
    }


def yardstick(common: Common, plain: PlainRuns, tolerance: float, *, compiled: bool) -> dict[str, Any]:
    """How far plain trainings are from one another that differ in how products are grouped."""
    whole, parts = (common.prepared(MODES[name]) for name in ("uncompiled", "recomputed"))
    found = {"micro_batches": compare(plain.of(parts), plain.of(whole), tolerance)}
    if compiled:
        found["compiled"] = compare(plain.of(whole, compiled=True), plain.of(whole), tolerance)
    return {"plain": asdict(plain.of(whole)), **found}


def of_mode(common: Common, mode: Mode, plain: PlainRuns, tokens: Sequence[Path], tolerance: float) -> dict[str, Any]:
    prepared = common.prepared(mode)
    start_s = time.perf_counter()
    numbers, problems = run_mode(common, mode, prepared, tokens)
    seconds = time.perf_counter() - start_s
    return {
        "about": mode.about,
        "problems": problems,
        **compare(numbers, plain.of(prepared), tolerance),
        "seconds": seconds,
        "plan": summary(prepared.plan, common.structure),
    }


def show(name: str, found: Mapping[str, Any]) -> None:
    """One line."""
    same = "same bits" if found["same_losses"] and found["same_grad_norms"] else ""
    verdict = "within" if found["within"] else "OUTSIDE"
    print(f"{name:<24}{found['greatest']:10.2e}{found['mean']:10.2e}  {verdict} {same}", flush=True)
    for problem in found.get("problems", ()):
        print(f"    not in this mode: {problem}", flush=True)


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path)
    options.add_argument("--commit")
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--config", type=Path, default=CONFIG)
    options.add_argument("--modes", default=",".join(MODES))
    options.add_argument("overrides", nargs="*")
    arguments = options.parse_intermixed_args()
    names = arguments.modes.split(",")
    if unknown := [name for name in names if name not in MODES]:
        options.error(f"--modes: no {', '.join(unknown)}; there are {', '.join(MODES)}")
    try:
        config = load_config(arguments.config, [*arguments.overrides, f"train.steps={arguments.steps}"]).resolve()
        check_settings(config)
    except ConfigError as error:
        options.error(str(error))
    report = measure(config, names, arguments.out, {"commit": arguments.commit or commit()})
    failed = [name for name in names if report["modes"][name]["problems"] or not report["modes"][name]["within"]]
    print(
        f"{len(names) - len(failed)} of {len(names)} modes within {report['tolerance']:g}; others: {failed or 'none'}"
    )
    return 1 if failed else 0


def measure(config: TrainConfig, names: Sequence[str], out: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the report anew after each mode."""
    compiled = any(MODES[name].compiled for name in names)
    tolerance = TOLERANCES[config.train.precision]
    common = Common.of(config, compiled=compiled)
    vocab_size = common.structure.vocab_size
    tokens = tokenize(config.data, config.tokenizer, vocab_size, Path(config.run_dir))
    data = DataWorker(config.data, tokens, vocab_size, config.train.batch_size or 0, 0, None)
    plain = PlainRuns(common, [data.batch(step) for step in range(1, config.train.steps + 1)])
    measured = yardstick(common, plain, tolerance, compiled=compiled)
    for name in measured.keys() - {"plain"}:
        show(f"plain, {name}", measured[name])
    report: dict[str, Any] = {
        **head,
        "hardware": hardware(common.machine.device),
        "versions": versions(),
        "config": config_to_dict(config),
        "tolerance": tolerance,
        "yardstick": measured,
        "modes": {},
    }
    for name in names:
        report["modes"][name] = of_mode(common, MODES[name], plain, tokens, tolerance)
        out.write_text(json.dumps(report, indent=1) + "\n")
        show(name, report["modes"][name])
    return report


if __name__ == "__main__":
    sys.exit(main())
