"""Formats the results of `megatrain bench`: all of them as JSON (docs/bench.md), the most important ones as a table."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain_ray.accounting.prediction_check import Comparison
from megatrain_ray.bench.aliased_memory import NOTE, HostMemory
from megatrain_ray.bench.bench import BenchResult
from megatrain_ray.bench.bench_config import BenchOptions
from megatrain_ray.config.yaml_file import config_to_dict
from megatrain_ray.console.run_summary import waits
from megatrain_ray.engine.layout.precision import FP8_COMPUTE, NARROW_MOMENTS
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.measure.plan_traffic import moved_bytes, state_share
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import shard_layout
from megatrain_ray.escapes import escaped
from megatrain_ray.machine.environment import commit, hardware, versions
from megatrain_ray.units import format_bytes, format_count, format_ranges

VERSION = 2  # 2: `plan` has the groups of plan.json 2
ABOVE_CEILING = 1.02  # a run faster than this share of its ceiling: more than the noise of a quiet machine


def to_report(result: BenchResult, options: BenchOptions) -> dict[str, Any]:
    """Return the results as plain data that can be written as JSON."""
    run_spec = result.observed.run_spec
    rows = result.rows[options.measured]
    step_s = _distribution([row["step_s"] for row in rows])
    tflops = _median(rows, "model_tflops")
    plan = _plan(run_spec.plan)
    return {
        "version": VERSION,
        "warmup": options.warmup,
        "steps": options.steps,
        "step_s": step_s,
        "tokens_per_s": _median(rows, "tokens_per_s"),
        "model_tflops": tflops,
        "exposed_s": {
            cause: statistics.median(row["exposed_s"][cause] for row in rows) for cause in rows[0]["exposed_s"]
        },
        "busy_share": result.busy_share,
        "prediction": plan.pop("prediction", None),
        "plan_sha256": run_spec.plan.sha256,
        "comparison": result.comparison and TypeAdapter(Comparison).dump_python(result.comparison, mode="json"),
        "ceiling": _ceiling(result, tflops),
        "in_process": _in_process(result, options, step_s["median"]),
        "memory": _memory(result),
        "aliased": {"note": NOTE, **asdict(HostMemory.of(run_spec))} if run_spec.is_aliased else None,
        "state_share": state_share(run_spec.plan),
        "optimizer": _optimizer(result),
        "bytes_per_parameter": {
            direction: num_bytes / run_spec.plan.num_parameters
            for direction, num_bytes in moved_bytes(run_spec.plan, run_spec.structure).items()
        },
        "plan": plan,
        "losses": _losses(result.rows),
        "all_step_s": [row["step_s"] for row in result.rows],
        "hardware": hardware(run_spec.plan.device),
        "versions": versions(),
        "commit": options.commit or commit(),
        "config": config_to_dict(run_spec.config),
    }


def to_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1, allow_nan=False)


def _distribution(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum, maximum and spread of the values; `spread` is (max - min) / median."""
    median, least, most = statistics.median(values), min(values), max(values)
    return {"median": median, "min": least, "max": most, "spread": (most - least) / median}


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the loss of each row; None if it is not finite, as in metrics.jsonl."""
    return [loss if (loss := row["loss"]) is not None and math.isfinite(loss) else None for row in rows]


def _ceiling(result: BenchResult, tflops: float) -> dict[str, Any] | None:
    ceiling = result.ceiling
    if ceiling is None:
        return None
    best = ceiling.best.model_tflops if ceiling.best else None
    own = tflops / result.observed.run_spec.config.hardware.num_gpus  # the ceiling is measured on one GPU
    return {
        "model_tflops": best,
        "micro_batch_size": ceiling.best.micro_batch_size if ceiling.best else None,
        "ratio": own / best if best else None,
        "hbm_peak_bytes": ceiling.hbm_peak_bytes,
        "trials": [asdict(trial) for trial in ceiling.trials],
    }


def _in_process(result: BenchResult, options: BenchOptions, median_s: float) -> dict[str, Any] | None:
    if result.in_process is None:
        return None
    step_s = _distribution([row["step_s"] for row in result.in_process[options.measured]])
    return {
        "step_s": step_s,
        "run_is_slower_by_percent": 100 * (median_s / step_s["median"] - 1),
        "same_losses": _losses(result.rows) == _losses(result.in_process),
    }


def _memory(result: BenchResult) -> dict[str, Any]:
    observed, last = result.observed, result.rows[-1]
    return {
        "hbm_bytes": observed.device_memory.num_bytes,
        "hbm_reason": observed.device_memory.reason,
        "hbm_peak_bytes": max(row["hbm_peak_bytes"] for row in result.rows),
        "hbm_held_bytes": last["hbm_held_bytes"],
        "hbm_retries": last.get("hbm_retries", 0),
        "arena_bytes": last["host_bytes"],
        "pss_bytes": sum(sum(kinds.values()) for kinds in observed.pss_bytes.values()),
        "pss_bytes_by_process": observed.pss_bytes,
    }


def _optimizer(result: BenchResult) -> dict[str, Any]:
    run_spec = result.observed.run_spec
    plan = run_spec.plan
    return {
        "kernels": list(result.observed.kernel_names),
        "num_shards": plan.shards.num_shards,
        "num_shard_threads": plan.shards.num_threads,
        "clip": run_spec.config.train.clip,
        "shards": list(_shards(result)),
    }


def _shards(result: BenchResult) -> Iterator[dict[str, Any]]:
    """Yield the placement and speed of each shard of the first host.

    The speed is parameters updated per second in which the kernel worked; None if the shard made no updates.
    """
    run_spec = result.observed.run_spec
    plan = run_spec.plan
    layout = run_spec.structure.layout(plan.num_fragments).on_host(0, plan.hosts.num_hosts)
    for k, (updates, update_s) in enumerate(result.observed.update_times):
        part = shard_layout(plan, layout, k)
        count = sum(layout.layers[i].logical(part.spans[i]).size for i in plan.layer_order)
        home = plan.shards.homes[k] if plan.shards.homes else None
        yield {
            "nodes": list(home.nodes) if home else None,
            "cpus": home.cpus if home else None,
            "num_parameters": count,
            "parameters_per_s": count * updates / update_s if update_s else None,
        }


def _plan(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, with counts instead of the list of layers.

    activation_budgets: number of compiled layers with each budget.
    """
    tree = json.loads(plan.to_json())
    layers = tree.pop("layers")
    return {
        "num_layers": len(layers),
        "num_parameters": plan.num_parameters,
        "num_trained": plan.num_trained,
        "hbm_layers": len(plan.hbm_layers),
        "spilled_layers": len(plan.spilled_layers),
        "weights_on_disk": len(plan.weights_on_disk),
        "stored_layers": len(plan.gradients_on_disk),
        "activations_on_disk": len(plan.disk_activations),
        "boundaries_on_host": sum(layer.boundary is Tier.HOST for layer in plan.layers),
        "kept_on_host": sum(layer.kept is Tier.HOST for layer in plan.layers),
        "boundaries_computed_again": len(plan.replayed_layers),
        "activations": dict(Counter(layer["activations"] for layer in layers)),
        "activation_budgets": dict(Counter(str(layer.activation_budget) for layer in plan.layers if layer.compiled)),
        **tree,
    }


def print_table(report: Mapping[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(report):
        table.add_row(name, Text(escaped(text)))
    Console().print(table)


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    step_s = report["step_s"]
    if aliased := report["aliased"]:
        held, planned = format_bytes(aliased["held_bytes"]), format_bytes(aliased["planned_bytes"])
        yield "NOTE", f"{aliased['note']}; host memory takes {held} where the plan has {planned}"
    spread = f"{step_s['min']:.4g} to {step_s['max']:.4g} (spread {step_s['spread']:.1%})"
    yield "step", f"{step_s['median']:.4g} s median of {report['steps']}, {spread}"
    yield "speed", f"{format_count(report['tokens_per_s'])} tokens/s, {report['model_tflops']:.4g} model TFLOPS"
    if predicted := report["prediction"]:
        error = predicted["step_s"] / step_s["median"] - 1
        yield "predicted", f"{predicted['step_s']:.4g} s a step by the plan ({error:+.1%})"
    if ceiling := report["ceiling"]:
        yield "ceiling", _ceiling_line(ceiling)
    if compared := report["in_process"]:
        difference = compared["run_is_slower_by_percent"]
        same = "the same losses" if compared["same_losses"] else "other losses"
        yield "one process", f"{compared['step_s']['median']:.4g} s; with Ray {difference:+.1f} %; {same}"
    yield "waited", waits(report["exposed_s"], step_s["median"])
    memory = report["memory"]
    device, arenas, processes = map(
        format_bytes, (memory["hbm_bytes"] or memory["hbm_peak_bytes"], memory["arena_bytes"], memory["pss_bytes"])
    )
    yield "memory", f"{device} of the device; host: {arenas} of arenas, {processes} of all processes"
    shares = ", ".join(f"{share:.0%} {tier}" for tier, share in report["state_share"].items() if share)
    optimizer, moved = report["optimizer"], report["bytes_per_parameter"]
    of_disk = f", {moved['disk']:.3g} from and to the disk" if moved["disk"] else ""
    on_link = f"{moved['h2d']:.3g} bytes per parameter in and {moved['d2h']:.3g} out"
    yield "state", f"{shares}; a step moves {on_link}{of_disk}"
    kernels, threads = ", ".join(optimizer["kernels"]), optimizer["num_shard_threads"]
    yield "AdamW", f"{kernels}, {optimizer['num_shards']} × {threads} threads"
    yield "of each", "; ".join(map(_shard_line, range(optimizer["num_shards"]), optimizer["shards"]))
    if report["config"]["train"]["compute"] == "fp8":
        yield "compute", FP8_COMPUTE
    if report["config"]["train"]["moments"] == "bf16":
        yield "moments", NARROW_MOMENTS
    yield "plan", _plan_line(report["plan"])


def _shard_line(index: int, shard: Mapping[str, Any]) -> str:
    place = f" (node {format_ranges(shard['nodes'])})" if shard["nodes"] else ""
    rate = shard["parameters_per_s"]
    speed = f"{format_count(rate)} parameters/s" if rate else "no updates"
    return f"shard {index}{place} {speed} of {format_count(shard['num_parameters'])}"


def _ceiling_line(ceiling: Mapping[str, Any]) -> str:
    if ceiling["model_tflops"] is None:
        return "none: the weights and one sequence do not fit the device"
    line = (
        f"{ceiling['model_tflops']:.4g} model TFLOPS with resident weights and micro-batches of "
        f"{ceiling['micro_batch_size']}; the run has {ceiling['ratio']:.3g} of it"
    )
    if ceiling["ratio"] > ABOVE_CEILING:
        line += ": more than there is, so something else used the machine meanwhile; measure again"
    return line


def _plan_line(plan: Mapping[str, Any]) -> str:
    step = plan["step"]
    activations = ", ".join(f"{number} × {policy}" for policy, number in plan["activations"].items())
    return (
        f"{format_count(plan['num_parameters'])} parameters in {plan['num_layers']} layers; "
        f"{step['num_micro_batches']} × {step['micro_batch_size']} × {step['seq_len']} tokens, {step['order']}; "
        f"activations: {activations}"
    )
