"""Runs `megatrain bench` for each named row of README.md's tables of speed, with its configuration and settings.

    python -m benchmarks.rows OUT_DIR ROW[:seconds] … [--commit HASH] [--warmup 1] [--steps 3] [-- option …]

Writes OUT_DIR/ROW.json (the report), ROW.log (what the run printed) and ROW.trace_steps_N.json (its timeline). A row
that fails or takes longer than its seconds is named at the end, with exit code 1; the other rows are run all the same.
Options after `--` go to every `megatrain bench`: `--no-ceiling`, `--compare-in-process`, settings.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain_ray.accounting.trace_file import find_traces

END_S = 30.0  # limit for a row to end that was interrupted
CONFIGS = Path(__file__).parent / "configs" / "speed"
# 20.5 billion parameters: their state fits neither device memory nor 123 GiB of RAM nor both.
TWENTY = "model.config.num_hidden_layers=67", "spill.path=runs/spill"
# Plans for larger machines, run on machines with 128 GiB of RAM; what they compute means nothing (docs/bench.md).
ALIASED = "--alias-host-memory=32GiB"
FOR_512GIB = "hardware.ram_limit=512GiB", ALIASED
ROWS = {
    "14.8b": ("qwen2.5_14.8b.yaml",),
    "7.6b": ("qwen2.5_7.6b.yaml",),
    **{
        f"7.6b_{number}gpus": ("qwen2.5_7.6b.yaml", f"hardware.num_gpus={number}", f"train.batch_size={64 * number}")
        for number in (2, 4)
    },
    "7.6b_16x4096": ("qwen2.5_7.6b.yaml", "data.seq_len=4096", "train.batch_size=16"),
    "7.6b_16x1024": ("qwen2.5_7.6b.yaml", "train.batch_size=16"),
    # Long sequences: 65,536 tokens a step, or one sequence where that is more.
    **{
        f"7.6b_{length}k": (
            "qwen2.5_7.6b.yaml",
            f"data.seq_len={length * 1024}",
            f"train.batch_size={max(1, 64 // length)}",
            f"model.config.max_position_embeddings={length * 1024}",
        )
        for length in (8, 32, 128, 512)
    },
    "7.6b_no_state": ("qwen2.5_7.6b.yaml", "hardware.hbm_layers=0"),
    "7.6b_80gb": ("qwen2.5_7.6b.yaml", "hardware.hbm_limit=80GB"),
    "7.6b_24gb": ("qwen2.5_7.6b.yaml", "hardware.hbm_limit=24GB", "hardware.ram_limit=123GiB"),
    "7.6b_10gb": ("qwen2.5_7.6b.yaml", "hardware.hbm_limit=10GB", "train.grad_dtype=bf16"),
    # In FP8, which is less than full precision, beside bf16 with as much RAM.
    "14.8b_245GiB": ("qwen2.5_14.8b.yaml", "hardware.ram_limit=245GiB"),
    "14.8b_245GiB_fp8": ("qwen2.5_14.8b.yaml", "hardware.ram_limit=245GiB", "train.compute=fp8"),
    # The shape, tokens and limits of als244/dataflow's published figures.
    **{
        f"llama3_8b_{limit}": ("llama3_8b.yaml", f"hardware.hbm_limit={limit}", "hardware.ram_limit=245GiB")
        for limit in ("8.8GiB", "25GiB", "67.3GiB")
    },
    "llama3_8b_8.8GiB_no_clip": (
        "llama3_8b.yaml",
        "hardware.hbm_limit=8.8GiB",
        "hardware.ram_limit=123GiB",
        "train.clip=null",
        "train.grad_dtype=bf16",
    ),
    # Whole blocks need 14 GiB.
    "mixtral_divided": ("mixtral_5.9b.yaml", "hardware.hbm_limit=12GB"),
    "mixtral": ("mixtral_5.9b.yaml",),
    "qwen3_30b_8layers": ("qwen3_30b_a3b.yaml", "model.config.num_hidden_layers=8"),
    "qwen3_30b_aliased": ("qwen3_30b_a3b.yaml", *FOR_512GIB),
    "qwen3_30b_256_aliased": ("qwen3_30b_a3b.yaml", "train.batch_size=256", *FOR_512GIB),
    "gpt_oss_20b_aliased": ("gpt_oss_20b.yaml", *FOR_512GIB),
    "gpt_oss_20b_256_aliased": ("gpt_oss_20b.yaml", "train.batch_size=256", *FOR_512GIB),
    "olmoe_7b": ("olmoe_7b.yaml",),
    "3.1b": ("qwen2.5_3.1b.yaml",),
    "32.8b": ("qwen2.5_32.8b.yaml",),
    "20b": ("qwen2.5_14.8b.yaml", *TWENTY),
    "20b_256": ("qwen2.5_14.8b.yaml", *TWENTY, "train.batch_size=256"),
    "7.6b_spilled": (
        "qwen2.5_7.6b.yaml",
        "hardware.hbm_limit=24GB",
        "hardware.ram_limit=48GiB",
        "train.grad_dtype=bf16",
        "spill.path=runs/spill",
    ),
    # Eight blocks of 72B, each of which takes more than the device has: divided.
    "7.5b_12gb_divided": (
        "qwen2.5_72b.yaml",
        "model.config.num_hidden_layers=8",
        "model.config.vocab_size=32000",
        "hardware.hbm_limit=12GB",
        "hardware.ram_limit=123GiB",
        "train.clip=null",
    ),
    "32.8b_aliased": ("qwen2.5_32.8b.yaml", ALIASED),
    "40.6b_aliased": (
        "qwen2.5_32.8b.yaml",
        "model.config.num_hidden_layers=80",
        *FOR_512GIB,
    ),
    "72b_aliased": ("qwen2.5_72b.yaml", ALIASED),
    "120b_aliased": ("qwen2.5_72b.yaml", "model.config.num_hidden_layers=134", "hardware.ram_limit=2TB", ALIASED),
    # What fits 1.5 TB without a disk: no gradient waits for a norm, and fewer activations for their backward.
    "120b_1.5tb_aliased": (
        "qwen2.5_72b.yaml",
        "model.config.num_hidden_layers=134",
        "train.clip=null",
        "train.batch_size=48",
        ALIASED,
    ),
    **{
        f"depth_{count}": ("llama3.2_depth.yaml", f"model.config.num_hidden_layers={count}")
        for count in (28, 56, 112, 180)
    },
}


def main(argv: Sequence[str]) -> int:
    argv, more = _split(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="+", type=_row, metavar="ROW[:seconds]")
    parser.add_argument("--commit")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0)
    options = parser.parse_args(argv)
    more = [f"--warmup={options.warmup}", f"--steps={options.steps}", *more]
    if options.commit:
        more.append(f"--commit={options.commit}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [row for row, limit_s in options.rows if not measure(row, limit_s or options.timeout, options.out, more)]
    if failed:
        print("failed:", *failed, flush=True)
    return int(bool(failed))


def measure(row: str, limit_s: float, out: Path, more: Sequence[str]) -> bool:
    """Run the benchmark of a row; return whether it has a report now."""
    config, *settings = ROWS[row]
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rows-") as folder, (out / f"{row}.log").open("w") as log:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "megatrain_ray", "bench", str(CONFIGS / config), "--json"]
        command += [f"run_dir={run_dir}", *settings, *more]
        ended = _run(command, limit_s, log.fileno())
        for trace in find_traces(run_dir):
            shutil.copy(trace, out / f"{row}.{trace.name}")
    report = _report(ended)
    took = f"{time.monotonic() - start_s:.0f} s"
    if report is None:
        print(f"{row}: no report after {took}; {(out / f'{row}.log')} ends with:", flush=True)
        print("\n".join((out / f"{row}.log").read_text(errors="replace").splitlines()[-12:]), flush=True)
        return False
    (out / f"{row}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{row}: {_line(report)}; {took}", flush=True)
    return True


def _run(command: list[str], limit_s: float, log: int) -> str:
    """Return the command's standard output.

    The command has a process group of its own, which is ended when time is up.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # once: the run stops its Ray itself
    try:
        return process.communicate(timeout=END_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _report(text: str) -> dict[str, Any] | None:
    try:
        report = json.loads(text)
    except json.JSONDecodeError:
        return None
    return report if isinstance(report, dict) else None


def _line(report: Mapping[str, Any]) -> str:
    """Return the figures of a report on one line. docs/bench.md describes the report."""
    step, plan, memory = report["step_s"], report["plan"], report["memory"]
    predicted = (report["prediction"] or {}).get("model_tflops")
    ceiling = report["ceiling"] or {}
    parts = {
        "TFLOPS": round(report["model_tflops"], 1),
        "predicted": predicted and round(predicted, 1),
        "s": round(step["median"], 3),
        "spread": round(step["spread"], 4),
        "ceiling": ceiling.get("model_tflops") and round(ceiling["model_tflops"], 1),
        "busy": report["busy_share"] and round(report["busy_share"], 4),
        "exposed": {cause: round(s, 3) for cause, s in report["exposed_s"].items() if s >= 0.0005},
        "compute": report["config"]["train"].get("compute"),
        "aliased": (report["aliased"] or {}).get("note"),
        "split": f"{plan['step']['num_micro_batches']} x {plan['step']['micro_batch_size']}",
        "order": plan["step"]["order"],
        "sums": plan["gradients"]["sums"],
        "in HBM": plan["hbm_layers"],
        "gradients on disk": plan["stored_layers"],
        "state on disk": plan["spilled_layers"],
        "tokens of an MLP chunk": plan["compute"]["mlp_chunk_tokens"],
        "boundaries on host": plan["boundaries_on_host"],
        "kept on host": plan["kept_on_host"],
        "replayed": plan["boundaries_computed_again"],
        "budgets": plan["activation_budgets"],
        "HBM GB": round((memory["hbm_bytes"] or 0) / 1e9, 1),
        "PSS GB": round((memory["pss_bytes"] or 0) / 1e9, 1),
        "in process": report["in_process"],
        "first losses": [round(x, 3) for x in report["losses"][:2]],
    }
    return " ".join(f"{name}={value}" for name, value in parts.items() if value not in (None, {}, 0.0))


def _row(text: str) -> tuple[str, float | None]:
    name, _, seconds = text.partition(":")
    if name not in ROWS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(ROWS)}")
    return name, float(seconds) if seconds else None


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
