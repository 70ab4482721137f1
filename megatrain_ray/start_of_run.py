"""Holds steps of the start of a run: its checks, what it prints, and what it writes into the run directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain_ray.config.checks import relative_paths
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import log_to, say, show
from megatrain_ray.console.start_summary import describe_start
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.hub_sources import fix_commits
from megatrain_ray.data.marks_and_template import decide_marks, describe_template, other_tokenizer
from megatrain_ray.data.tokenize_data import check_there
from megatrain_ray.driver.policy import RunPolicy
from megatrain_ray.driver.run_context import DataTokens, read_data
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.report import less_precise
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.data_counts import num_records
from megatrain_ray.io.checkpoints.leftovers import Leftovers
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.machine.machine import machine_of, unused_gpu
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.positions import check_length, written_positions
from megatrain_ray.model.vision_tower import check_images
from megatrain_ray.planning.plan_diff import report_change
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.profiling.profiles import measured
from megatrain_ray.profiling.spill_disk import with_spill
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_model import read_leftovers, record_model
from megatrain_ray.run.save_mirror import SaveMirror, mirroring
from megatrain_ray.run.train_output import TrainOutput

log = logging.getLogger(__name__)


def tokenize_all(
    config: TrainConfig, vocab_size: int | None, run_dir: Path, startup: Startup,
    position: Mapping[str, Any] | None = None,
) -> tuple[TrainConfig, DataTokens]:  # fmt: skip
    """Return the configuration with what its data leave open decided, and its tokens. Raises as read_data.

    position: as for read_data.
    """
    config = decide_marks(fix_commits(config), vocab_size)
    check_there(config)
    return config, read_data(config, vocab_size, run_dir, startup, position)


def check_model_for_data(config: TrainConfig, source: ModelSource) -> None:
    """Raise ConfigError, before the data are read, if they do not go with the model."""
    check_length(config.data, written_positions(source.config))
    check_images(config.data, source, config.train.vision)


def check_absolute(config: TrainConfig) -> None:
    """Raise ConfigError if run_dir or spill.path is relative. Folders of caches are not checked."""
    for problem in relative_paths(config):
        raise ConfigError(
            f"{problem}, and a Ray job runs in a folder of its own that goes with it; give an absolute path"
        )


@contextmanager
def opened_run(config: TrainConfig) -> Iterator[tuple[RunDir, SaveMirror | None]]:
    """Yield the directory of the run, with its log, and its mirror. Raises as RunDir.open and mirroring."""
    with RunDir.open(config) as run, log_to(run.logs / "driver.log"), mirroring(run) as mirror:
        yield run, mirror


def measured_machine(config: TrainConfig, startup: Startup) -> Machine:
    """Return the machine. It is measured, if at all, before anything else of a start could disturb that."""
    hardware = config.hardware
    num_gpus = hardware.num_gpus // hardware.num_hosts
    return with_spill(measured(machine_of(hardware), hardware.profile, startup, num_gpus), config.spill)


def output_if_done(run: RunDir, manifest: Manifest | None, config: TrainConfig) -> TrainOutput | None:
    """Return the output of a run that is finished, and print that it is; else None. `config`: as it was given."""
    if manifest is None or not RunPolicy.of(run.config).is_done_after(manifest.step, run.evaluations()):
        return None
    run.clean()  # of a start that was killed while it deleted older saves
    if reason := run.early_end(manifest.step):
        say(f"the run has {reason}; a larger eval_patience, or null, goes on")
    epochs = config.train.epochs
    length = f" of {config.train.steps}" if epochs is None else f", at or past the end of train.epochs: {epochs:g}"
    show(f"already at step {manifest.step}{length}: nothing to do ({run.path})")
    key = "train.steps" if epochs is None else "train.epochs"
    say(f"to go on, also with changed rates, give a larger {key}; to train anew, another run_dir")
    return TrainOutput.of(run, manifest.step, None)


def describe_run(
    run_spec: RunSpec, data: DataTokens, manifest: Manifest | None, epochs: float | None, leftovers: Leftovers
) -> None:
    """Print what is about to be trained. `epochs`: train.epochs as given."""
    config, plan = run_spec.config, run_spec.plan
    if warning := unused_gpu(config.hardware):
        say(warning)
    if warning := other_tokenizer(config):
        say(warning)
    for line in describe_start(
        config, plan, model_type=run_spec.source.config["model_type"], counts=data.counts,
        num_held_out=num_records(data.held_out) if data.held_out else None,
        num_made=manifest.step if manifest else 0, epochs=epochs, leftovers=leftovers,
        unreached=run_spec.structure.unreached,
    ):  # fmt: skip
        say(line)
    if config.data.has_chats:
        for line in describe_template(config.data, config.tokenizer, run_spec.structure.vocab_size):
            say(line)


def begin_run(
    run_spec: RunSpec, run: RunDir, manifest: Manifest | None, leftovers: Leftovers, mirror: SaveMirror | None
) -> None:
    """Make the directory hold the run, and start its mirror."""
    run.claim()
    left = run.clean()
    first = read_leftovers(run.path) if run.has_begun else None
    record_model(run.path, run_spec.source.config, run_spec.structure, first or leftovers)
    before = run.read_plan() if run.has_begun else None
    run.begin(run_spec.plan.to_json(), manifest.step if manifest else 0)
    report_change(before, run_spec.plan)
    run.keep_tokenizer()
    for path in left:
        log.info("deleted what a dead run left: %s", path)
    if mirror:
        mirror.start()


def report_formats(plan: Plan, manifest: Manifest | None) -> None:
    """Print what is not as precise as plain PyTorch, and that a save's moments are converted."""
    moments = plan.precision.moments
    for line in less_precise(plan):
        say(line)
    if manifest is not None and manifest.moments != moments:
        how = "to nearest, this once" if moments == "bf16" else "exactly"
        say(f"the save's moments are {manifest.moments}: from here on they are {moments}, converted {how}")
