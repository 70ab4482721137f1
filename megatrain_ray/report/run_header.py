"""Describes in a few words what a run is of, how it went, and which of its settings are not the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.values import HubDataset, Source, WeightedPath, listed
from megatrain_ray.config.yaml_file import dump_settings
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.run.best_evaluation import before_training, best_evaluation, is_no_better
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import What
from megatrain_ray.run.run_model import model_type
from megatrain_ray.units import format_bytes, format_count, format_duration, format_quantity

Rows = Sequence[Mapping[str, Any]]


def describe_run(files: RunFiles, config: TrainConfig, plan: Plan | None, history: Rows) -> dict[str, str]:
    """Return model, size, device, data and rows of a run; what is not known is left out."""
    described = {"model": _model(files, config)}
    if plan:
        trained = "" if plan.num_trained == plan.num_parameters else f", {format_count(plan.num_trained)} trained"
        described["size"] = f"{format_count(plan.num_parameters)} parameters{trained}, {plan.number_formats}"
    if device := _device(config, plan, history):
        described["device"] = device
    described["data"] = f"{config.data.kind}, {_sources(config.data.path)}"
    if config.train.objective != "sft":
        described["learns"] = f"by {config.train.objective}"
    described["step"] = f"{format_quantity(config.num_step_rows, 'row')} of {config.data.seq_len} tokens"
    return described


def _model(files: RunFiles, config: TrainConfig) -> str:
    kind = model_type(files.path)
    name = config.model.path or "random weights"
    adapters = f", adapters of rank {config.lora.rank}" if config.lora else ""
    return f"{name}{f' ({kind})' if kind else ''}{adapters}"


def _device(config: TrainConfig, plan: Plan | None, history: Rows) -> str:
    """Return the device of the newest start."""
    start = next((row for row in reversed(history) if row["what"] == What.START.value), {})
    hardware, gpus = start.get("hardware"), config.hardware.num_gpus
    if not isinstance(hardware, Mapping):
        return plan.device if plan else ""
    if (plan and plan.device == "cpu") or not hardware.get("gpu"):
        return ", ".join(["CPU", *filter(None, [hardware.get("cpu")])])
    memory = hardware.get("gpu_memory_bytes")
    of_memory = f", {format_bytes(memory)}" if isinstance(memory, int) else ""
    return f"{f'{gpus} × ' if gpus > 1 else ''}{hardware['gpu']}{of_memory}"


def _sources(path: str | tuple[Source, ...]) -> str:
    """Return the first source of the data, and how many more there are."""
    first, *more = listed(path)
    name = first.hub if isinstance(first, HubDataset) else first.path if isinstance(first, WeightedPath) else first
    return f"{name}{f' and {len(more)} more' if more else ''}"


def headline(rows: Rows, evaluations: Rows) -> dict[str, str]:
    """Return the three numbers that matter most: loss, best held-out loss and time. `rows` are sound."""
    found = {}
    if rows:
        found["loss, first → last step"] = f"{_loss(rows[0].get('loss'))} → {_loss(rows[-1].get('loss'))}"
    if best := best_evaluation(evaluations):
        before = before_training(evaluations) if is_no_better(evaluations) else None
        worse = f", worse than {before['eval_loss']:.4f} before training" if before else ""
        found["best held-out loss"] = f"{best['eval_loss']:.4f} after step {best['step']:,}{worse}"
    if rows:
        steps_s = sum(row.get("step_s", 0.0) for row in rows)
        evaluations_s = sum(row.get("eval_s", 0.0) for row in evaluations)
        of_it = f" ({format_duration(steps_s)} in steps)" if evaluations else ""
        found["time"] = f"{format_duration(steps_s + evaluations_s)}{of_it}"
    return found


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def other_settings(config: TrainConfig) -> str:
    """Return the settings that differ from their defaults, as YAML."""
    return dump_settings(config.model_dump(exclude_defaults=True))


def resumes(history: Rows) -> Iterator[int]:
    """Yield the steps that starts of the run went on from, if they had made any."""
    for row in history:
        step = row.get("step")
        if row["what"] == What.START.value and isinstance(step, int) and step > 0:
            yield step
