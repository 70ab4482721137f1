"""Compares first-step gradients of the engine with plain autograd, parameter by parameter, on one device.

    python benchmarks/gradients.py CONFIG OUT_FOLDER [--layers I,J,…] [key=value …]

Both run the same weights and batch in the same mode, the engine in poison mode. Plain autograd holds the whole model on
the device. `--layers` compares only those (0 is the embedding, -1 the head), for models whose FP32 gradients would fill
the host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.initialization import no_init_weights

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.engine.model.micro_batch import micro_batches_of
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.workers.open_device import make_device
from tests.support.local_host import LocalHost


class Recorder:
    """Stands in for a shard: keeps the arriving gradients of the layers that are compared."""

    def __init__(self, layers: frozenset[int]) -> None:
        self._layers = layers
        self.gradients: dict[int, Tensor] = {}

    def update(
        self, layer: int, gradient: Tensor, header: UpdateParams, serial: int, directions: Tensor | None
    ) -> None:
        if layer in self._layers:
            self.gradients[layer] = gradient.clone()


async def engine_gradients(
    run_spec: RunSpec, weights: dict[str, Tensor], batch: Batch, layers: frozenset[int]
) -> tuple[float, dict[str, Tensor]]:
    plan = run_spec.plan
    layout = run_spec.structure.layout(plan.num_fragments)
    working = torch.full((layout.size,), float("nan"), dtype=plan.precision.working_dtype)
    for flat, start in zip(layout.layers, layout.starts, strict=True):
        for s in flat.owned:
            flat.view(working[start : start + flat.size], s.name).copy_(weights[s.name])
    recorder = Recorder(layers)
    device = make_device(plan, deterministic=True)
    host = LocalHost(plan, layout, working, [recorder], device.timeline)  # type: ignore[list-item]
    engine = build_engine(run_spec.source.factory, run_spec.structure, plan, device, host, poison=True)
    step = StepInput(1, micro_batches_of(batch, run_spec.plan.step.micro_batch_size), batch.num_supervised, 0)
    report = await engine.step(step, UpdateParams(1, 1, 1e-4), 1.0)
    await host.drain(1)
    await host.close()
    await engine.close()
    gradients = {
        s.name: flat.view(recorder.gradients[i], s.name).float()
        for i, flat in enumerate(layout.layers)
        if i in layers
        for s in flat.owned
    }
    return report.loss, gradients


def plain_gradients(
    run_spec: RunSpec, model: Any, batch: Batch, names: frozenset[str]
) -> tuple[float, dict[str, Tensor]]:
    device = make_device(run_spec.plan, deterministic=True)
    sums: dict[str, Tensor] = {}
    total = 0.0
    with device.activate():
        for mb in micro_batches_of(batch, run_spec.plan.step.micro_batch_size):
            model.zero_grad(set_to_none=True)
            logits = model(mb.input_ids.to(device.torch_device), use_cache=False).logits.float()
            targets = mb.targets.to(device.torch_device).flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
            loss = loss / batch.num_supervised
            loss.backward()
            total += loss.item()
            del logits
            for name, p in model.named_parameters():
                if name not in names:
                    continue
                sums[name] = p.grad.float() if name not in sums else sums[name] + p.grad.float()
    device.close()
    return total, {name: g.cpu() for name, g in sums.items()}


def compare(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, Any]:
    errors = {n: float((ours[n] - g).norm() / g.norm()) for n, g in plain.items()}
    worst = max(errors, key=lambda n: errors[n])
    equal = sum(torch.equal(ours[n], g) for n, g in plain.items())
    return {"bit_equal": equal, "worst_parameter": worst, "largest_relative_error": errors[worst]}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("config", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("--layers", default="")
    options.add_argument("overrides", nargs="*")
    arguments = options.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides).resolve()
    run_spec = prepare(config)
    flats = run_spec.structure.layout(run_spec.plan.num_fragments).layers
    chosen = [int(index) for index in arguments.layers.split(",") if index] or range(len(flats))
    layers = frozenset(index % len(flats) for index in chosen)
    names = frozenset(s.name for index in layers for s in flats[index].owned)
    batch_size = run_spec.plan.step.micro_batch_size * run_spec.plan.step.num_micro_batches
    vocab_size = run_spec.structure.vocab_size
    tokens = tokenize(config.data, config.tokenizer, vocab_size, Path(config.run_dir))
    batch = DataWorker(config.data, tokens, vocab_size, batch_size, 0, None).batch(1)
    torch.manual_seed(0)
    dtype = run_spec.plan.precision.working_dtype
    with no_init_weights():  # which takes minutes on the host; buffers are made there, as the engine makes them
        model = run_spec.source.factory(dtype)
    model.tie_weights()  # which no_init_weights leaves out
    model = model.to(run_spec.plan.device)  # type: ignore[arg-type]
    for p in model.parameters():
        p.data.normal_(0.0, 0.02) if p.dim() > 1 else p.data.fill_(1.0)
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    plain_loss, plain = plain_gradients(run_spec, model.train(), batch, names)
    del model
    plan = run_spec.plan
    tokens = plan.step.micro_batch_size * plan.step.seq_len
    report: dict[str, Any] = {
        "config": str(arguments.config),
        "overrides": arguments.overrides,
        "layers": sorted(layers),
        "plan": {
            "order": plan.step.order.value,
            "activations": plan.layers[1].activations.value,
            "sums": plan.gradients.sums.value,
            "num_micro_batches": plan.step.num_micro_batches,
        },
        "plain_loss": plain_loss,
        "parameters": len(plain),
    }
    for name, chunk in {"one_loss_chunk": tokens, "as_planned": plan.compute.loss_chunk_tokens}.items():
        chunked = replace(run_spec, plan=replace(plan, compute=replace(plan.compute, loss_chunk_tokens=chunk)))
        loss, ours = asyncio.run(engine_gradients(chunked, weights, batch, layers))
        report[name] = {"chunk_tokens": chunk, "loss": loss, **compare(ours, plain)}
    print(json.dumps(report), flush=True)
    with (arguments.out / "gradients.jsonl").open("a") as file:
        file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
