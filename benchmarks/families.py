"""Compares one step of a tiny model of each family with plain autograd of the unmodified model, on one device.

    python -m benchmarks.families OUT.json COMMIT [--device cpu] [--only NAME …]

Compared are losses and the gradient of each parameter (with β₁ = 0 and without clipping, m is the gradient): how many
have the same bits, and the largest relative distance of the others. Steps are made in FP32 and BF16 with deterministic
kernels: with one document a row, and with several documents a row where the model keeps them apart, with SDPA and with
flex attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.vertical_slice import machine
from megatrain_ray.data.python_objects import save_model
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_device import CudaDevice
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.model.attention import MIN_HEAD_DIM, Attention, flex_problem
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.model.sight_check import check_packing
from megatrain_ray.virtual_clock import Timeline
from tests.support.documents import packed
from tests.support.families import FAMILIES
from tests.support.family_models import build_family, family_batches
from tests.support.quantised import as_fp8, as_mxfp4
from tests.support.reference import Recipe, Result, load_model, train_reference
from tests.support.run_engine import EngineResult, Mode, folder_source, train_engine

# One family each without masks of its own, with windows, capped scores, sinks: each compiles for tens of seconds.
WITH_FLEX = ("Llama", "Mistral", "Gemma 2", "GPT-OSS")
# The forward of these models needs four axes of positions to keep documents apart, which the reference does not give.
NOT_PACKED = ("Qwen2-VL", "Qwen2.5-VL")
# Folders with quantised weights, which both dequantise: each a family, and how its folder is turned into one.
QUANTISED = {"GPT-OSS, MXFP4": ("GPT-OSS", as_mxfp4), "DeepSeek-V3, FP8": ("DeepSeek-V3", as_fp8)}
BOUNDS = {"fp32": 1e-4, "bf16": 5e-2}  # relative, of a gradient's norm


def make_device(kind: str, timeline: Timeline, num_threads: int) -> Device:
    return CpuDevice(timeline, num_threads) if kind == "cpu" else CudaDevice(timeline, deterministic=True)


def compare(ours: EngineResult, theirs: Result) -> dict[str, Any]:
    errors = {
        name: float((ours.exp_avg[name] - m.cpu()).norm() / (m.norm().cpu() + 1e-30))
        for name, m in theirs.exp_avg.items()
        if not torch.equal(ours.exp_avg[name], m.cpu())
    }
    worst = max(errors, key=lambda name: errors[name], default=None)
    return {
        "loss": ours.losses[0],
        "loss_error": abs(ours.losses[0] / theirs.losses[0] - 1),
        "parameters": len(theirs.exp_avg),
        "same_bits": len(theirs.exp_avg) - len(errors),
        "worst": worst,
        "error": errors[worst] if worst else 0.0,
    }


def family_of(name: str) -> str:
    return QUANTISED[name][0] if name in QUANTISED else name


def plain_folder(folder: Path, name: str) -> Path:
    """Return the folder, or that of its weights as Transformers dequantises them.

    In 5.23 it gives parameters that are not quantised no other type than they are stored in, whatever is asked for.
    """
    plain = folder / "plain"
    if name in QUANTISED and not plain.exists():
        save_model(load_model(folder, torch.float32).float(), plain)
    return plain if name in QUANTISED else folder


def case(folder: Path, name: str, batch: Batch, recipe: Recipe, attention: Attention, kind: str) -> dict[str, Any]:
    mode = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_fragments=3, packed_attention=attention)
    start_s = time.perf_counter()
    try:
        ours = train_engine(folder, [batch], recipe, mode, make_device=lambda *args: make_device(kind, *args))
        frozen, reference = FAMILIES[family_of(name)].frozen, plain_folder(folder, name)
        device = make_device(kind, Timeline(), 1)
        with device.activate():
            on_device = dataclasses.replace(recipe, device=device.torch_device.type)
            theirs = train_reference(reference, [batch], on_device, frozen=frozen)
        device.close()
    except Exception as error:  # of one family: the others still run
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    return compare(ours, theirs) | {"seconds": time.perf_counter() - start_s}


def attentions(name: str, folder: Path, kind: str) -> Sequence[Attention]:
    """Return the attention kinds with which this family can have several documents in a row."""
    if name in NOT_PACKED:
        return []
    factory = folder_source(folder).factory
    try:
        check_packing(folder_source(folder).architecture)
    except ConfigError:
        return []
    flex = kind == "cuda" and name in WITH_FLEX and flex_problem(build_empty(factory, torch.float32)) is None
    return [Attention.SDPA, Attention.FLEX] if flex else [Attention.SDPA]


def family(name: str, kind: str) -> list[dict[str, Any]]:
    rows = []
    with TemporaryDirectory() as folder:
        changes = {"head_dim": MIN_HEAD_DIM} if name in WITH_FLEX else {}
        if name in QUANTISED:
            changes["intermediate_size"] = 64  # whole blocks
        path = build_family(family_of(name), Path(folder), **changes)
        if name in QUANTISED:
            QUANTISED[name][1](path)
        cases = [(family_batches(1)[0], Attention.SDPA), *((packed(0), a) for a in attentions(name, path, kind))]
        for precision in ("fp32", "bf16"):
            for batch, attention in cases:
                size = min(2, batch.input_ids.shape[0])
                recipe = Recipe(1, precision=precision, micro_batch_size=size, clip=None, betas=(0.0, 0.95))
                head = {"family": name, "precision": precision, "packed": batch.positions is not None}
                row = head | {"attention": attention.value} | case(path, name, batch, recipe, attention, kind)
                row["within"] = "failed" not in row and row["error"] <= BOUNDS[precision]
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("commit")
    arguments.add_argument("--only", nargs="+", default=[*FAMILIES, *QUANTISED])
    arguments.add_argument("--device", default="cuda")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    rows = [row for name in options.only for row in family(name, options.device)]
    report = {"machine": machine(), "transformers": transformers.__version__, "bounds": BOUNDS, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    outside = [f"{row['family']} {row['precision']} {row['attention']}" for row in rows if not row["within"]]
    print(f"{len(rows)} cases, outside: {outside}")


if __name__ == "__main__":
    main()
