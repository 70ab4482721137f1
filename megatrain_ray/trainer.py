"""Implements Trainer, the driver of a run. Only it knows all components; they know nothing of each other."""

from __future__ import annotations

import logging
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import log_to, say
from megatrain_ray.console.startup import Startup
from megatrain_ray.convert.training_arguments import with_arguments
from megatrain_ray.crew.failures import FailureBudget
from megatrain_ray.crew.placement import CrewSpec, Placement
from megatrain_ray.crew.ray_cluster import Daemons, cluster, in_ray_job, joins_cluster
from megatrain_ray.crew.ray_resources import check_device
from megatrain_ray.crew.worker_group import Crew
from megatrain_ray.data.data_worker import HeldOutData, naming_eval_path, open_stream
from megatrain_ray.data.python_objects import Objects
from megatrain_ray.data.tokenize_data import check_there, tokenize
from megatrain_ray.driver.interrupts import Interrupts
from megatrain_ray.driver.policy import Observation, RunPolicy
from megatrain_ray.driver.session import Job, Session
from megatrain_ray.engine.discovery.packing_check import check_packing
from megatrain_ray.engine.layout.precision import NARROW_MOMENTS
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError, DamagedSaveError, LostProcessError, MegatrainError
from megatrain_ray.export.export import export_run, has_adapters, load_exported
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import clean_unfinished, list_saves, load_manifest, set_aside
from megatrain_ray.io.tokens.cache_pruning import held
from megatrain_ray.io.tokens.tokenizer import tokenizer_files
from megatrain_ray.machine.environment import hardware, versions
from megatrain_ray.machine.machine import machine_of
from megatrain_ray.metrics.sinks import check_packages, open_sinks
from megatrain_ray.model.discover_model import compiles
from megatrain_ray.model.model_source import ModelSource, read_model
from megatrain_ray.planning.plan_diff import changes, is_same_placement
from megatrain_ray.planning.prepare import Prepared, check_length, prepare
from megatrain_ray.profiling.profiles import measured
from megatrain_ray.profiling.spill_disk import with_spill
from megatrain_ray.report.html_report import report_behind
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_history import History
from megatrain_ray.run.run_model import check_model, record_model
from megatrain_ray.run.run_processes import await_end
from megatrain_ray.workers.early_imports import TRANSFORMERS, importing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSummary:
    """Holds the result of a training.

    step: updates of the run so far, those of earlier processes included.
    loss: of the last update; None if none ran.
    rows, evaluations: of metrics.jsonl and evaluations.jsonl, that this process wrote and that were not cut again.
    """

    step: int
    loss: float | None
    run_dir: Path
    rows: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()

    def export(self, out_dir: Path | str, dtype: Literal["bf16", "fp32"] | None = None, *, merge: bool = False) -> Path:
        """Write the newest save as a Hugging Face folder, and return the folder.

        With `lora` this is a folder of peft's, or with `merge` the model with its adapters added in. Raises as
        export_run does.
        """
        export_run(self.run_dir, Path(out_dir), dtype, merge=merge)
        return Path(out_dir)

    def load_model(self, dtype: Literal["bf16", "fp32"] | None = None) -> Any:
        """Return the model of the newest save as a PreTrainedModel on the CPU, with its adapters added in.

        dtype: None: that of the working copy.

        Meanwhile the run directory needs room for an export. Raises as export_run does.
        """
        with tempfile.TemporaryDirectory(prefix=".export-", dir=self.run_dir) as folder:
            return load_exported(self.export(folder, dtype, merge=has_adapters(self.run_dir)))


class Trainer:
    """Trains what a TrainConfig describes, and resumes the run if its directory holds one."""

    def __init__(
        self, config: TrainConfig | Mapping[str, Any] | None = None, *, model: Any = None, args: Any = None,
        train_dataset: Any = None, eval_dataset: Any = None, tokenizer: Any = None, processing_class: Any = None,
    ) -> None:  # fmt: skip
        """Take a configuration, or settings and the objects that some of them would name.

        config: a TrainConfig, or its settings as in a YAML file.
        args: a transformers.TrainingArguments, for what the settings do not say (convert/training_arguments.py).
        processing_class: the tokenizer.

        Objects replace the settings that would name files: model.path, data.path, data.eval_path, data.tokenizer. These
        settings are then left out. data/python_objects.py says what the objects may be. data.kind follows the first
        record unless it is set.

        Raises ConfigError.
        """
        self._objects = Objects(model, train_dataset, eval_dataset, tokenizer or processing_class)
        if isinstance(config, TrainConfig):
            if args is not None or not self._objects.is_empty:
                raise ConfigError("config: with objects give the settings as a mapping, without those of their files")
            self.config = config
            return
        settings = dict(config or {})
        if args is not None:
            settings.setdefault("run_dir", args.output_dir)
        tree = self._objects.fill(settings)
        if args is not None:
            tree = with_arguments(args, tree, self._objects.num_records)
        self.config = TrainConfig.model_validate(tree)

    def fit(self, at_end: Callable[[Job, Crew], None] = lambda job, crew: None) -> TrainSummary:
        """Train until `train.steps` updates are made, and return a summary.

        at_end: called when all steps are made, as in Job.

        Raises ConfigError (2), CapacityError (3), InterruptedRunError (130, after a save unless `save_every: null`),
        and MegatrainError (1) for anything that failed while running. The numbers are exit codes.
        """
        if in_ray_job():
            _check_absolute(self.config)
        startup = Startup()
        with ExitStack() as stack:
            interrupts = stack.enter_context(Interrupts(saves=self.config.save_every is not None))
            run = stack.enter_context(RunDir.open(self.config))
            stack.enter_context(log_to(run.logs / "driver.log"))
            await_end(run.path)
            manifest = _newest_save(run)
            if manifest is not None and _is_done(run, manifest.step):
                return TrainSummary(manifest.step, None, run.path)
            after = stack.enter_context(ExitStack())  # callbacks for when every process has ended
            stack.enter_context(self._objects.written(run))
            source = read_model(run.config.model)  # a missing model is reported before anything is started
            check_length(run.config, source.written_positions)
            check_there(run.config)
            machine = _machine(run.config, startup)
            daemons, placement = stack.enter_context(_processes(run.config, machine, startup))
            with startup.phase("reading the model's configuration"):
                prepared = self._prepare(run.config, machine, source)
            run = replace(run, config=prepared.config)
            if run.has_begun:
                check_model(run.path, prepared.source.config, prepared.structure)
            _tell_of_moments(run.config.train.moments, manifest)
            if manifest is not None:
                _tell_of_resume(run, manifest.step)
            elif rows := run.rows():
                say(f"warning: no save of the {len(rows)} steps in metrics.jsonl is there: training begins again")
            inputs = _check_inputs(prepared, run.path, manifest, startup)
            with held(inputs.folders):
                after.callback(_clean_unfinished, run)
                _begin(prepared, run, manifest)
                budget = FailureBudget(run.config.max_failures)
                job = Job(prepared, inputs.tokens, inputs.held_out, run, interrupts, daemons, startup, budget, at_end)
                with report_behind(run.path), _history(job, manifest.step if manifest else 0):
                    return _train(job, manifest, placement)

    def _prepare(self, config: TrainConfig, machine: Machine, source: ModelSource) -> Prepared:
        return prepare(config, machine, source)


def _check_absolute(config: TrainConfig) -> None:
    """Raise ConfigError if run_dir or spill.path is relative. Folders of caches are not checked."""
    for key, path in (("run_dir", config.run_dir), ("spill.path", config.spill.path)):
        if path is not None and not Path(path).is_absolute():
            raise ConfigError(
                f"{key}: {path} is relative, and a Ray job runs in a folder of its own that goes with it; give an "
                "absolute path"
            )


def _machine(config: TrainConfig, startup: Startup) -> Machine:
    """Return the machine. It is measured, if at all, before anything else of a start could disturb that."""
    hardware = config.hardware
    return with_spill(
        measured(machine_of(hardware), hardware.profile, startup, hardware.num_gpus // hardware.num_hosts), config.spill
    )


@contextmanager
def _processes(config: TrainConfig, machine: Machine, startup: Startup) -> Iterator[tuple[Daemons, Placement]]:
    """Start Ray, and processes for the run, which begin to import what they need.

    The driver imports Transformers while Ray starts.
    """
    hardware = config.hardware
    spec = CrewSpec(
        num_shards=machine.shards(hardware.num_shards),
        device=machine.device,
        num_workers=hardware.num_gpus,
        num_hosts=hardware.num_hosts,
        draws=config.model.path is None,
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


def _tell_of_resume(run: RunDir, step: int) -> None:
    num_again = sum(row["step"] > step for row in run.rows())
    again = f"; {num_again} steps that were not saved are made again" if num_again else ""
    say(f"resuming from the save of step {step}{again}")
    if missing := run.missing_rows(step):
        say(
            f"warning: metrics.jsonl has no rows of {len(missing)} of the {step} steps up to that save, the first of "
            f"them step {missing[0]}: they were deleted; training is not changed by it"
        )
    for kept in run.kept_saves():
        say(f"note: {kept}; save_keep does not count it")
    before, now = run.read_config().train, run.config.train
    if before.steps != now.steps and now.schedule != "constant":
        say(f"train.steps was {before.steps}: from here on the learning rate follows the schedule of {now.steps} steps")


def _tell_of_moments(moments: str, manifest: Manifest | None) -> None:
    """Print the precision of moments, and that they are converted. Prints nothing if they are FP32 and were before."""
    if moments == "bf16":
        say(f"moments {NARROW_MOMENTS}")
    if manifest is not None and manifest.moments != moments:
        how = "to nearest, this once" if moments == "bf16" else "exactly"
        say(f"the save's moments are {manifest.moments}: from here on they are {moments}, converted {how}")


@dataclass(frozen=True)
class Inputs:
    """Holds the folders of the tokens of the data's sources, and what is evaluated."""

    tokens: tuple[Path, ...]
    held_out: HeldOutData | None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders of all tokens."""
        return (*self.tokens, *(self.held_out.tokens if self.held_out else ()))


def _is_done(run: RunDir, step: int) -> bool:
    """Return whether the run is done after `step` updates.

    A run whose last evaluation is missing is not done: it was killed during that, or eval_every is new.
    """
    here = Observation(step, step, step, interrupted=False, evaluated=run.last_evaluated)
    return RunPolicy.of(run.config).is_done(here)


def _check_inputs(prepared: Prepared, run_dir: Path, manifest: Manifest | None, startup: Startup) -> Inputs:
    """Check everything that can be wrong with files, before the run is written or started. Raises ConfigError."""
    config = prepared.config
    check_packages(config)
    with startup.phase("looking for weights and tokenizer"):
        prepared.source.check_weights(prepared.structure)
        if manifest is None:
            prepared.source.check_adapter(prepared.structure)
        tokenizer_files(config.tokenizer)  # from the hub now, if at all: records of ids do not need it
    vocab_size = prepared.structure.vocab_size
    startup.tell("reading data")
    tokens = tokenize(config.data, config.tokenizer, vocab_size, run_dir)
    stream = open_stream(config.data, tokens, vocab_size, batch_size=1)
    held_out = _held_out(prepared, run_dir)
    if stream.joins_documents or (held_out and held_out.open().joins_documents):
        check_packing(prepared.source.factory, prepared.structure)
    if manifest is not None:
        stream.seek(manifest.data)
    return Inputs(tokens, held_out)


def _held_out(prepared: Prepared, run_dir: Path) -> HeldOutData | None:
    """Return the held-out data, or None if nothing is evaluated."""
    config, plan, vocab_size = prepared.config, prepared.plan, prepared.structure.vocab_size
    data = config.data.held_out
    if data is None:
        return None
    if not config.eval_every:
        say("data.eval_path is set and eval_every is 0: nothing is evaluated")
        return None
    with naming_eval_path():
        tokens = tokenize(data, config.tokenizer, vocab_size, run_dir, "data.eval_path")
    return HeldOutData(data, tokens, vocab_size, plan.batch_size, plan.step.micro_batch_size * plan.hosts.num_gpus)


def _begin(prepared: Prepared, run: RunDir, manifest: Manifest | None) -> None:
    """Make the directory hold the run."""
    run.claim()
    left = run.clean()
    record_model(run.path, prepared.source.config, prepared.structure)
    before = run.read_plan() if run.has_begun else None
    run.begin(prepared.plan.to_json(), manifest.step if manifest else 0)
    _tell_of_plan(before, prepared.plan)
    run.keep_tokenizer()
    for path in left:
        log.info("deleted what a dead run left: %s", path)


def _tell_of_plan(before: Plan | None, plan: Plan) -> None:
    """Log the plan's hash before step 1, and print what differs from the plan of the previous start, if any."""
    log.info("plan.json has the SHA-256 %s", plan.sha256)
    if before is None or before.sha256 == plan.sha256:
        return
    tell = log.info if is_same_placement(before, plan) else say
    tell(f"the plan is another one than that of the start before: {changes(before, plan) or 'by its rates'}")


def _clean_unfinished(run: RunDir) -> None:
    """Delete unfinished saves. Call it when every process has ended, so that nobody writes them."""
    with suppress(MegatrainError, OSError):  # the error that ended the run must be reported
        clean_unfinished(run.saves, run.token)


def _history(job: Job, step: int) -> AbstractContextManager[None]:
    """Return a context that records a start after `step` updates, before anything of it can fail, and its end."""
    plan, steps = job.prepared.plan, job.run.config.train.steps
    here = {"host": platform.node(), "hardware": hardware(plan.device), "versions": versions()}
    return History(job.run.path).of_start(step, steps, plan.sha256, **here)


def _train(job: Job, manifest: Manifest | None, placement: Placement | None) -> TrainSummary:
    """Train, and start again from a save if one turns out to be damaged or a process cannot be replaced.

    After a damaged save an earlier one is used; after a death the newest one.

    placement: holds actors that have started already; used in the first attempt only.
    """
    run, plan = job.run, job.prepared.plan
    first = manifest.step if manifest else 0
    num_evaluations = len(run.evaluations())
    while True:
        step = manifest.step if manifest else 0
        aliased = ", host memory aliased" if job.prepared.is_aliased else ""
        log.info("step %d of %d, %s%s", step, run.config.train.steps, plan.device, aliased)
        num_failures = job.failures.count
        try:
            # At the start from 0: the evaluation before the first update is written with step 0.
            with open_sinks(run.config, run.path, step + 1 if step else 0) as sinks:
                completed, loss = Session(job, manifest, sinks, placement).train()
            rows = [row for row in run.rows() if row["step"] > first]
            return TrainSummary(completed, loss, run.path, rows, run.evaluations()[num_evaluations:])
        except DamagedSaveError as damage:
            _fall_back(run, step, damage)
        except LostProcessError as death:
            if job.failures.count == num_failures:  # this death has not been counted yet
                job.failures.spend("a process of the run", f"{death}; ")
            saves = list_saves(run.saves)
            origin = f"going on from the save of step {saves[-1]}" if saves else "nothing is saved: beginning again"
            say(f"{death}; {origin} ({job.failures})")
        placement = None
        await_end(run.path)  # the memory of two crews would not fit
        _clean_unfinished(run)
        manifest = _newest_save(run)
        first = min(first, manifest.step if manifest else 0)
        run.begin(plan.to_json(), manifest.step if manifest else 0)
        num_evaluations = min(num_evaluations, len(run.evaluations()))


def _newest_save(run: RunDir) -> Manifest | None:
    """Return the manifest of the newest save that can be read; None if there is no save.

    Raises DamagedSaveError if there are saves and none of them can be read, ConfigError for a save of another run.
    """
    for step in reversed(list_saves(run.saves)):
        try:
            manifest = load_manifest(run.saves, step)
        except DamagedSaveError as damage:
            _fall_back(run, step, damage)
        else:
            run.check_save(step, manifest)
            return manifest
    return None


def _fall_back(run: RunDir, step: int, damage: DamagedSaveError) -> None:
    """Set a damaged save aside, so that training goes on from the one before.

    Raises DamagedSaveError if there is none before it.
    """
    earlier = [saved for saved in list_saves(run.saves) if saved < step]
    if not earlier:
        raise DamagedSaveError(
            f"{damage}; there is no earlier save to go back to: repair it, or delete {run.saves} to start from step 0"
        )
    aside = set_aside(run.saves, step)
    say(f"warning: {damage}; it is kept as {aside.name}, training goes on from the save of step {earlier[-1]}")
