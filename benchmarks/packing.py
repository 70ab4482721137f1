"""Compares several documents in a row, with whole masks (sdpa) and flex attention, with rows of one document each.

    python benchmarks/packing.py OUT.json [--device cpu --seq-len 64 --layers 2 --hidden 64]

There are two questions. Parity, in FP32 and BF16 with four layers: are loss and gradients of documents side by side in
a row those of the same documents in rows of their own, and does flex attention give the same bits twice? Cost, with all
layers of a 0.5B shape (Qwen2.5's) in BF16: seconds of a step, of the first one and of later ones, and device memory
compared with the plan's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.micro_batch import micro_batches_of
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.engine.step.warm_up import WarmUpShapes
from megatrain_ray.io.batching.batch import Batch, assemble
from megatrain_ray.io.batching.windows import Rows
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.workers.open_device import make_device
from tests.support.local_host import LocalHost

VOCAB = 32000


class Recorder:
    """Stands in for a shard: keeps the last gradient of each layer, or none."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.gradients: dict[int, Tensor] = {}

    def update(
        self, layer: int, gradient: Tensor, header: UpdateParams, serial: int, directions: Tensor | None
    ) -> None:
        if self._keeps:
            self.gradients[layer] = gradient.clone()


def run_spec(options: argparse.Namespace, attention: str, num_layers: int, batch: int, precision: str) -> RunSpec:
    heads = options.hidden // 64 or 1
    shape = {
        "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": options.hidden, "num_hidden_layers": num_layers,
        "intermediate_size": options.hidden * 38 // 7, "num_attention_heads": heads, "tie_word_embeddings": True,
        "num_key_value_heads": max(1, heads // 7), "max_position_embeddings": 1 << 17,
    }  # fmt: skip
    tree = {
        "model": {"config": shape, "attention": attention},
        "data": {"path": "unread", "tokenizer": "bytes", "seq_len": options.seq_len},
        "train": {"steps": 1, "micro_batch_size": batch, "precision": precision, "deterministic": options.parity},
        "hardware": {"device": options.device},
        "run_dir": "unused",
    }
    return prepare(TrainConfig.model_validate(tree).resolve())


def documents(seq_len: int, num_rows: int, *, apart: bool) -> Batch:
    """Return random ids in rows of eight documents each, about as long as texts of the web are.

    apart: each document has a row of its own, padded.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (num_rows, seq_len + 1), generator=generator)
    cuts = torch.randperm(seq_len - 1, generator=generator)[:7].sort().values + 1
    numbers = torch.bucketize(torch.arange(seq_len + 1), cuts, right=True).expand(num_rows, -1)
    if apart:
        spans = [(row, (numbers[row] == k).nonzero().flatten()) for row in range(num_rows) for k in range(8)]
        alone = torch.zeros(len(spans), seq_len + 1, dtype=torch.int64)
        marks = torch.full_like(alone, -1)
        for i, (row, columns) in enumerate(spans):
            alone[i, : len(columns)], marks[i, : len(columns)] = ids[row, columns], 0
        ids, numbers = alone, marks
    rows = Rows(ids.numpy(), numbers.numpy(), (numbers >= 0).float().numpy(), torch.zeros(ids.shape).numpy())
    return assemble(rows)


async def steps(ready: RunSpec, batch: Batch, num_steps: int, recorder: Recorder) -> dict[str, Any]:
    """Make steps of the engine without an optimizer, on weights that stay as they are; return what was measured."""
    plan, layout = ready.plan, ready.structure.layout(ready.plan.num_fragments)
    generator = torch.Generator().manual_seed(1)
    working = torch.zeros(layout.size, dtype=plan.precision.working_dtype)
    for flat, start in zip(layout.layers, layout.starts, strict=True):
        for s in flat.owned:
            view = flat.view(working[start : start + flat.size], s.name)
            view.fill_(1.0) if len(s.shape) == 1 else view.normal_(0.0, 0.02, generator=generator)
    device = make_device(plan, deterministic=ready.config.train.deterministic)
    device.pin(working)
    host = LocalHost(plan, layout, working, [recorder], device.timeline)  # type: ignore[list-item]
    engine = build_engine(ready.source.factory, ready.structure, plan, device, host)
    start_s = time.perf_counter()
    await engine.run_warm_up(WarmUpShapes(packed=True))
    rehearsal_s = time.perf_counter() - start_s
    reports = []
    for step in range(1, num_steps + 1):
        micro_batches = micro_batches_of(batch, plan.step.micro_batch_size)
        given = StepInput(step, micro_batches, batch.num_supervised, 0)
        reports.append(await engine.step(given, UpdateParams(step, step, 1e-4), 1.0))
        await host.drain(step)
    await host.close()
    await engine.close()
    return {
        "attention": plan.compute.packed_attention.value,
        "loss": reports[-1].loss,
        "grad_norm": reports[-1].grad_norm,
        "rehearsal_s": rehearsal_s,
        "first_step_s": reports[0].step_s,
        "step_s": min(report.step_s for report in reports[-3:]),
        "peak_bytes": reports[-1].memory.peak_bytes,
        "planned_bytes": plan.total_bytes(Tier.HBM),
        "planned_masks_bytes": next(row.num_bytes for row in plan.memory_items if row.name == "attention masks"),
        "activations": plan.layers[1].activations.value,
    }


def gradients(
    options: argparse.Namespace, attention: str, precision: str, *, apart: bool
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients by name, of one step on one row of eight documents."""
    batch = documents(options.seq_len, 1, apart=apart)
    ready = run_spec(options, attention, min(4, options.layers), batch.input_ids.shape[0], precision)
    recorder = Recorder(keeps=True)
    report = asyncio.run(steps(ready, batch, 1, recorder))
    layers = ready.structure.layout(ready.plan.num_fragments).layers
    named = {s.name: flat.view(recorder.gradients[i], s.name) for i, flat in enumerate(layers) for s in flat.owned}
    return report["loss"], {name: gradient.float() for name, gradient in named.items()}


def parity(options: argparse.Namespace) -> dict[str, Any]:
    """Return the relative distance of gradients from those of documents apart: the largest of all parameters."""
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        loss, plain = gradients(options, "sdpa", precision, apart=True)
        row: dict[str, Any] = {"loss_apart": loss}
        for attention in options.attentions:
            loss, ours = gradients(options, attention, precision, apart=False)
            again, twice = gradients(options, attention, precision, apart=False)
            errors = {name: float((ours[name] - g).norm() / g.norm()) for name, g in plain.items()}
            worst = max(errors, key=lambda name: errors[name])
            same = loss == again and all(torch.equal(ours[name], twice[name]) for name in ours)
            row[attention] = {"loss": loss, "worst": worst, "error": errors[worst], "same_bits_twice": same}
        found[precision] = row
    return found


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--seq-len", type=int, default=8192)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--hidden", type=int, default=896)
    options = arguments.parse_args()
    options.attentions = ["sdpa", "flex"] if options.device == "cuda" else ["sdpa"]
    result: dict[str, Any] = {"torch": torch.__version__, "options": vars(options) | {"out": None}}
    long = options.seq_len
    options.seq_len, options.parity = min(long, 1024), True
    result["parity"] = parity(options)
    print(json.dumps(result["parity"]), flush=True)
    options.seq_len, options.parity = long, False
    batch = documents(long, options.batch, apart=False)
    result["cost"] = []
    for attention in options.attentions:
        try:
            ready = run_spec(options, attention, options.layers, options.batch, "bf16")
            row = asyncio.run(steps(ready, batch, 4, Recorder(keeps=False)))
        except Exception as error:  # out of memory is a result, too
            row = {"attention": attention, "error": f"{type(error).__name__}: {error}"[:300]}
        result["cost"].append(row)
        print(json.dumps(row), flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    options.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
