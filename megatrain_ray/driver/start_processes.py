"""Starts the processes of a run, up to where they are ready for a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import Startup
from megatrain_ray.crew.placement import ActorsSpec, Placement, actors_spec
from megatrain_ray.crew.ray_cluster import cluster, in_ray_job, joins_cluster
from megatrain_ray.crew.ray_daemons import Daemons
from megatrain_ray.crew.ray_resources import check_device
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.driver.run_saves import SaveRates, check_save_room, measure_disk
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import save_folder
from megatrain_ray.model.discover_model import compiles
from megatrain_ray.planning.stop_deadline import stop_wait_s, warning_of
from megatrain_ray.spans import traced_steps
from megatrain_ray.units import format_count
from megatrain_ray.workers.early_imports import TRANSFORMERS, importing
from megatrain_ray.workers.messages import Progress


def start_processes(
    crew: WorkerGroup, context: RunContext, manifest: Manifest | None, progress: Callable[[], Progress]
) -> SaveRates:
    """Start all actors, load their state and build the engine. Return the rates of saves.

    manifest: of the save to go on from; None: begin with the model's initial values.
    progress: returns where training stands at the moment of the call.

    Raises CapacityError if saves have no room, and what the crew raises.
    """
    plan, config, run, startup = context.run_spec.plan, context.run_spec.config, context.run, context.startup
    disk_bytes_per_s = 0.0
    if config.save_every is not None:
        with startup.phase("measuring the disk"):
            check_save_room(context.run_spec, run.saves, progress().step, run.token)
            disk_bytes_per_s = measure_disk(run.saves, plan.save_bytes, config.save_compress)
    with startup.phase(f"starting {actors_spec(context.run_spec).num_processes} processes"):
        crew.start(_data_arguments(context, manifest))
    with startup.phase(_loading(context, manifest)):
        crew.load(None if manifest is None else save_folder(run.saves, manifest.step), manifest)
        copy_bytes_per_s = crew.copy_bytes_per_s()
    with startup.phase("building the engine" + (" and compiling its layers" if plan.compute.compiled_loss else "")):
        crew.begin(progress)
    if in_ray_job():
        _warn_of_stop(context, disk_bytes_per_s)
    return SaveRates(disk_bytes_per_s, copy_bytes_per_s)


def _data_arguments(context: RunContext, manifest: Manifest | None) -> dict[str, Any]:
    """Return the arguments of a data process. It skips from where this attempt began to the requested batch."""
    config, plan = context.run_spec.config, context.run_spec.plan
    return {
        "data": config.data,
        "tokens": context.tokens,
        "logprobs": context.logprobs,
        "vocab_size": context.run_spec.structure.vocab_size,
        "batch_size": plan.batch_size,
        "num_readers": plan.hosts.num_gpus,
        "step": manifest.step if manifest else 0,
        "position": manifest.data if manifest else None,
        "held_out": context.held_out,
        "traced": traced_steps(config.log.trace),
        "rollouts": context.rollouts.files if context.rollouts else None,
        "streamed": context.streamed and replace(context.streamed, vocab_size=context.run_spec.structure.vocab_size),
        "micro_batch_size": plan.step.micro_batch_size * plan.hosts.num_gpus,
    }


def _loading(context: RunContext, manifest: Manifest | None) -> str:
    parameters = f"{format_count(context.run_spec.plan.num_parameters)} parameters"
    if manifest is not None:
        return f"restoring {parameters} from the save of step {manifest.step}"
    return f"loading {parameters}" if context.run_spec.source.folder else f"making {parameters} at random"


def _warn_of_stop(context: RunContext, disk_bytes_per_s: float) -> None:
    """Print a warning if a stopped job of Ray would be killed before its last save is complete."""
    plan = context.run_spec.plan
    step_s = plan.prediction.step_s if plan.prediction else 0.0
    needed_s = stop_wait_s(plan, context.run_spec.config.save_interval, disk_bytes_per_s, step_s)
    if warning := warning_of(needed_s, os.environ):
        say(warning)


@contextmanager
def ray_processes(config: TrainConfig, machine: Machine, startup: Startup) -> Iterator[tuple[Daemons, Placement]]:
    """Start Ray, and processes for the run, which import what they need. The driver imports Transformers meanwhile."""
    hardware = config.hardware
    spec = ActorsSpec(
        num_shards=machine.shards(hardware.num_shards),
        device=machine.device,
        num_workers=hardware.num_gpus,
        num_hosts=hardware.num_hosts,
        compiles=compiles(config, machine.device),
    )
    if hardware.num_hosts > 1 and not joins_cluster():
        raise ConfigError(
            f"hardware.num_hosts: {hardware.num_hosts}, and there is no Ray cluster: start Ray on every host and set "
            "RAY_ADDRESS to the head's address, or submit a job (docs/several_hosts.md)"
        )
    with ExitStack() as stack:
        with startup.phase("starting Ray and importing Transformers"), importing(TRANSFORMERS):
            daemons = stack.enter_context(cluster(spec.num_processes, spec.num_gpus))
            check_device(hardware.device, machine.device)
            placement = Placement(spec)
        try:
            yield daemons, placement
        finally:
            if not daemons.processes:  # a cluster of our own ends them itself
                placement.clear()
