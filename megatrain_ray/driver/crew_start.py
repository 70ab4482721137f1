"""Starts the actors of a run, up to where they are ready for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain_ray.console.startup import Startup
from megatrain_ray.crew.placement import crew_spec
from megatrain_ray.crew.worker_group import Crew
from megatrain_ray.driver.running_save import check_save_room, measure_disk
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import save_folder
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.units import format_count
from megatrain_ray.workers.gpu_worker import Progress


@dataclass(frozen=True)
class SaveRates:
    """Holds the rates from which the stall of a save is predicted. That of the disk is 0 if nothing is saved."""

    disk_bytes_per_s: float
    copy_bytes_per_s: float


def start_crew(
    crew: Crew, prepared: Prepared, run: RunDir, manifest: Manifest | None, progress: Callable[[], Progress],
    data_arguments: Callable[[], Mapping[str, Any]], startup: Startup,
) -> SaveRates:  # fmt: skip
    """Start all actors, load their state and build the engine. Return the rates of saves.

    manifest: of the save to go on from; None: begin with the model's initial values.
    progress, data_arguments: return where training stands at the moment of the call.

    Raises CapacityError if saves have no room, and what the crew raises.
    """
    plan = prepared.plan
    disk_bytes_per_s = 0.0
    if prepared.config.save_every is not None:
        with startup.phase("measuring the disk"):
            check_save_room(prepared, run.saves, progress().step, run.token)
            disk_bytes_per_s = measure_disk(run.saves, plan.save_bytes, prepared.config.save_compress)
    with startup.phase(f"starting {crew_spec(prepared).num_processes} processes"):
        crew.start(data_arguments)
    with startup.phase(_loading(prepared, manifest)):
        crew.load(None if manifest is None else save_folder(run.saves, manifest.step), manifest)
        copy_bytes_per_s = crew.copy_bytes_per_s()
    with startup.phase("building the engine" + (" and compiling its layers" if plan.compute.compiled_loss else "")):
        crew.begin(progress)
    return SaveRates(disk_bytes_per_s, copy_bytes_per_s)


def _loading(prepared: Prepared, manifest: Manifest | None) -> str:
    parameters = f"{format_count(prepared.plan.num_parameters)} parameters"
    if manifest is not None:
        return f"restoring {parameters} from the save of step {manifest.step}"
    return f"loading {parameters}" if prepared.source.folder else f"making {parameters} at random"
