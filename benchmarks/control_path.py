"""Measures what the control path costs the host: microseconds of each visit of a layer, and of the visit's parts.

The same layer called without the engine is measured beside it. It runs in one process, on any device.

    python -m benchmarks.control_path OUT.json [--compiled] [--recompute] [--device cpu] [--layers 48 --hidden 64
        --vocab 256 --seq-len 16] [key=value …]

Without options the model is so small that its layers cost their launches only. For Qwen2.5-0.5B on a GPU the options
are, with and without `hardware.hbm_layers=0`:

    --device cuda --compiled --layers 24 --hidden 896 --vocab 151936 --seq-len 1024

A step is one micro-batch of one sequence. A second process stands in for the optimizer shards: it answers as they do
and updates nothing, so nothing waits for an update.

`visits` are medians over blocks, from three traced steps; time that belongs to no named part is `rest`. `update_us` is
the update of a layer that lives on the device. `step_s` is the time of steps that are not traced. `thread_s` is the
compute thread's processor time in them (on a GPU without backwards, which autograd runs on a thread of its own). On a
GPU, `kernels_s` is how long the kernels of one step run, by torch's profiler, and `span_us` is a block's time on the
compute stream.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import mmap
import multiprocessing
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import override
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.host.shared_host import Momenta, SharedHost
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layer_calls.compiled_call import compiler_options, keep_compiled_graphs
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.model.structure import LayerKind
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.engine.step.warm_up import WarmUpShapes
from megatrain_ray.io.words.atomic_words import WORD_BYTES
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.spans import Row, Span
from megatrain_ray.workers.device_layers import DeviceLayers
from megatrain_ray.workers.open_device import make_device

WARMUP_STEPS, PLAIN_STEPS, TRACED_STEPS = 3, 10, 3
ALONE_ROUNDS = 100
WEIGHT = 0.02  # all weights: finite numbers are all that is wanted of them


class Constant:
    """Stands in for a model's weights: every element is WEIGHT."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return torch.full((stop - start,), WEIGHT)


def run_spec(options: argparse.Namespace) -> RunSpec:
    heads = options.hidden // 64 or 1
    shape = {
        "model_type": "qwen2", "vocab_size": options.vocab, "hidden_size": options.hidden, "tie_word_embeddings": True,
        "num_hidden_layers": options.layers, "intermediate_size": options.hidden * 38 // 7,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 7), "max_position_embeddings": 1 << 15,
    }  # fmt: skip
    tree: dict[str, Any] = {
        "model": {"config": shape},
        "data": {"path": "unread", "tokenizer": "bytes", "seq_len": options.seq_len},
        "train": {"steps": 1, "batch_size": 1},
        "hardware": {"device": options.device, "compile": options.compiled, "num_shards": 1},
        "run_dir": "unused",
    }
    for setting in options.overrides:
        override(tree, setting)
    ready = prepare(TrainConfig.model_validate(tree).resolve())
    plan = replace(
        ready.plan, compute=replace(ready.plan.compute, num_threads=1)
    )  # more only wait for each other in layers as small as these
    if options.recompute:
        layers = (replace(layer, activations=ActivationPolicy.RECOMPUTE) for layer in plan.layers[:-1])
        plan = replace(plan, layers=(*layers, plan.layers[-1]))
    return replace(ready, plan=plan)


def answer(buffer: mmap.mmap, plan: Plan) -> None:
    """Answer each update as a shard's process does, without updating anything."""
    words = SharedUpdateState(memoryview(buffer), len(plan.layers), len(plan.updated_layers))
    for update in itertools.count(1) if plan.layer_order else ():
        for layer in plan.layer_order:
            while not words.gradients.wait_landed(layer, update, 1.0, committed=True):
                if words.stopped:
                    return
            words.generations.begin(0, layer, update)
            words.generations.finish(0, layer, update)


class Seconds(NamedTuple):
    """Holds the seconds of one step: its wall time, and the processor time of the compute thread in it."""

    step: float
    thread: float


class Run:
    """Runs steps of an engine whose optimizer shards another process stands in for, through the shared words."""

    def __init__(self, ready: RunSpec, words: SharedUpdateState) -> None:
        self._plan = plan = ready.plan
        self._layout = layout = ready.structure.layout(plan.num_fragments)
        self.device = device = make_device(plan, deterministic=False)
        working = torch.full((layout.size_among(plan.host_layers),), WEIGHT, dtype=plan.precision.working_dtype)
        slab = torch.zeros(plan.gradients.slab_bytes, dtype=torch.uint8)
        device.pin(working.view(torch.uint8))
        device.pin(slab)
        self._resident = DeviceLayers(ready, layout, device, words) if plan.hbm_layers else None
        if self._resident:
            self._resident.shard.load(Constant())
        self._host = SharedHost(plan, layout, working, slab, words, Momenta([], []))
        self._engine = build_engine(
            ready.source.factory, ready.structure, plan, device, self._host,
            device_shard=self._resident.shard if self._resident else None,
            gate=self._resident.gate if self._resident else None,
        )  # fmt: skip
        ids = torch.arange(plan.step.seq_len)[None] % ready.structure.vocab_size
        self._micro_batch = MicroBatch(ids, ids.clone())
        self._num_steps = 0

    async def run_warm_up(self) -> None:
        await self._engine.run_warm_up(WarmUpShapes())

    async def steps(self, count: int) -> list[Seconds]:
        """Make `count` steps and return the seconds of each. Updates are done on return."""
        seconds = []
        for _ in range(count):
            self._num_steps += 1
            step = StepInput(self._num_steps, (self._micro_batch,), self._plan.step.seq_len, 0)
            thread_s = await self._engine.on_compute_thread(time.thread_time)
            report = await self._engine.step(step, UpdateParams(self._num_steps, self._num_steps, 0.0), 1.0)
            thread_s = await self._engine.on_compute_thread(time.thread_time) - thread_s
            self.device.timeline.clear()
            seconds.append(Seconds(report.step_s, thread_s))
        await self._host.drain(self._num_steps)
        return seconds

    async def traced(self) -> list[Span]:
        await self._engine.on_compute_thread(self.device.start_tracing)
        await self.steps(TRACED_STEPS)
        await self._engine.on_compute_thread(self.device.stop_tracing)
        return sorted(self.device.spans.take().spans, key=lambda span: span.start_ns)

    async def close(self) -> None:
        await self._host.close()
        if self._resident:
            self._resident.close()
        await self._engine.close()


async def measure(ready: RunSpec, words: SharedUpdateState) -> dict[str, Any]:
    run = Run(ready, words)
    await run.run_warm_up()
    await run.steps(WARMUP_STEPS)
    steps = await run.steps(PLAIN_STEPS)
    spans = await run.traced()
    blocks = [i for i, layer in enumerate(ready.structure.layers) if layer.kind is LayerKind.BLOCK]
    on_gpu = run.device.kind == "cuda"
    of_thread = Row.SUBMIT if on_gpu else Row.COMPUTE
    found: dict[str, Any] = {
        "step_s": shortest_and_median(s.step for s in steps),
        "thread_s": shortest_and_median(s.thread for s in steps),
    }
    if not ready.plan.step.captured:
        found["visits"] = visits_of([s for s in spans if s.row is of_thread], blocks)
    if ready.plan.hbm_layers:
        updates = [s.end_ns - s.start_ns for s in spans if s.name == "update" and s.row is of_thread]
        found["update_us"] = round(statistics.median(updates) / 1000, 1)
    if on_gpu:
        found["span_us"] = span_us([s for s in spans if s.row is Row.COMPUTE and s.layer in blocks])
        found["kernels_s"] = await kernels_s(run)
    await run.close()
    return found


def shortest_and_median(seconds: Iterable[float]) -> dict[str, float]:
    several = sorted(seconds)
    return {"min": several[0], "median": statistics.median(several)}


def visits_of(spans: Sequence[Span], blocks: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the median microseconds of each part of a visit, for visits of the forward and of the backward.

    A visit lasts from its first span to the first span of the next visit. Visits of the first and the last block are
    left out.

    spans: spans of the compute thread, in order.
    blocks: indices of the decoder blocks.
    """
    first = [s for s in spans if s.name in ("forward", "recompute", "backward", "loss")]
    begins = [s for s, before in zip(first, [None, *first], strict=False) if before is None or s.layer != before.layer]
    parts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for begin, end in itertools.pairwise(begins):
        if begin.layer not in blocks[1:-1]:
            continue
        inside = [s for s in spans if begin.start_ns <= s.start_ns < end.start_ns]
        of_visit: dict[str, float] = defaultdict(float)
        for s in inside:
            of_visit["waits" if s.waits else s.name] += (s.end_ns - s.start_ns) / 1000
        of_visit["all"] = (end.start_ns - begin.start_ns) / 1000
        of_visit["rest"] = 2 * of_visit["all"] - sum(of_visit.values())
        for name, microseconds in of_visit.items():
            parts["forward" if begin.name == "forward" else "backward"][name].append(microseconds)
    return {
        phase: {name: round(statistics.median(of_part), 1) for name, of_part in of_phase.items()}
        for phase, of_phase in parts.items()
    }


def span_us(spans: Sequence[Span]) -> dict[str, float]:
    """Return the median microseconds of the spans, by name.

    Where the compute stream waits for the host to launch kernels, the spans include that wait.
    """
    found = defaultdict(list)
    for s in spans:
        found[s.name].append((s.end_ns - s.start_ns) / 1000)
    return {name: round(statistics.median(of_name), 1) for name, of_name in found.items()}


async def kernels_s(run: Run) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        await run.steps(1)
    return sum(e.self_device_time_total for e in profile.key_averages() if not e.key.startswith("Mem")) / 1e6


def layer_alone(ready: RunSpec, device: Device) -> dict[str, float]:
    """Return the microseconds of host time that a block's forward and backward take without an engine."""
    torch.manual_seed(0)
    model = ready.source.factory(ready.plan.precision.working_dtype).to(device.torch_device)
    path = next(layer.modules[0] for layer in ready.structure.layers if layer.kind is LayerKind.BLOCK)
    block = model.get_submodule(path)
    given: list[Any] = []
    handle = block.register_forward_pre_hook(lambda _, *arguments: given.append(arguments), with_kwargs=True)
    with torch.no_grad():
        ids = torch.zeros(1, ready.plan.step.seq_len, dtype=torch.int64, device=device.torch_device)
        model(input_ids=ids, use_cache=False)
    handle.remove()
    (hidden, *args), kwargs = given[0]
    hidden.requires_grad_(True)
    call = torch.compile(block, fullgraph=True, dynamic=False, options=compiler_options()) if compiled(ready) else block
    forward, backward = [], []
    for _ in range(ALONE_ROUNDS):
        start = time.perf_counter()
        output = call(hidden, *args, **kwargs)
        output = output if isinstance(output, torch.Tensor) else output[0]
        middle = time.perf_counter()
        torch.autograd.grad(output, [hidden, *block.parameters()], output.detach())
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
        if len(forward) % 10 == 0:
            device.record().synchronize()  # a full queue of launches would make the host wait
    return {"forward": 1e6 * statistics.median(forward), "backward": 1e6 * statistics.median(backward)}


def compiled(ready: RunSpec) -> bool:
    return any(layer.compiled for layer in ready.plan.layers)


@contextmanager
def shard_of(plan: Plan) -> Iterator[SharedUpdateState]:
    """Yield the words that a process shares which answers as an optimizer shard.

    It is forked before anything else runs, and uses nothing but the words.
    """
    count = SharedUpdateState.num_words(len(plan.layers), len(plan.updated_layers))
    buffer = mmap.mmap(-1, WORD_BYTES * count)
    words = SharedUpdateState(memoryview(buffer), len(plan.layers), len(plan.updated_layers))
    words.reset(0, plan.updated_layers)
    process = multiprocessing.get_context("fork").Process(target=answer, args=(buffer, plan), daemon=True)
    process.start()
    try:
        yield words
    finally:
        words.stop()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    for name, default in (("layers", 48), ("hidden", 64), ("vocab", 256), ("seq-len", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", default=None)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    ready = run_spec(options)
    with shard_of(ready.plan) as words:
        if options.compiled:
            keep_compiled_graphs()
        found = asyncio.run(measure(ready, words))
    device = make_device(ready.plan, deterministic=False)
    with device.activate():
        alone = layer_alone(ready, device)
    device.close()
    plan = ready.plan
    result = {
        "machine": {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()},
        "options": vars(options) | {"out": None},
        "plan": {
            "activations": plan.layers[1].activations.value,
            "compiled": plan.layers[1].compiled,
            "captured": plan.step.captured,
            "layers_on_device": len(plan.hbm_layers),
            "slots": len(plan.slots.weights),
            "uploads_per_step": plan.slots.num_uploads,
        },
        **found,
        "layer_alone": {name: round(microseconds, 1) for name, microseconds in alone.items()},
    }
    print(json.dumps(result), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
