"""Makes a Plan from a TrainConfig: finds what a run would do without doing any of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.engine.device.hardware_profile import TYPICAL_DISK_BYTES_PER_S, HardwareProfile
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import Trials
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.objectives.distillation import TopTokens
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.planner.request import Machine, ObjectiveBytes, Request, SpillSpace
from megatrain_ray.engine.planner.search.infeasible import lacks_device_memory
from megatrain_ray.engine.planner.search.make_plan import (
    plan_with_compression,
    predict_plan,
    predict_sampled_token,
    predict_scores,
)
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.io.images.feature_files import NO_FEATURES, FeatureFolders
from megatrain_ray.io.storage.disk_io import DiskWay
from megatrain_ray.io.tokens.teacher_files import RecordSize
from megatrain_ray.machine.machine import machine_of
from megatrain_ray.machine.no_collections import no_collections
from megatrain_ray.model.discover_model import compiles, discover_with_attention
from megatrain_ray.model.flop_count import active_experts, windows
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import checked, read_model
from megatrain_ray.model.positions import check_length
from megatrain_ray.model.vision_tower import check_images, check_tower
from megatrain_ray.profiling.profiles import check_profile, with_profile
from megatrain_ray.profiling.spill_disk import with_spill

log = logging.getLogger(__name__)

BLOCK_PARTS = (2, 4, 8)  # numbers of parts that are tried if whole blocks do not fit


@dataclass(frozen=True)
class RunSpec:
    """Holds everything that is known before the first process starts. It is picklable; actors receive it whole.

    config: configuration with the plan's split into micro-batches.
    weighted: whether batches have loss weights, which the tokens of the data decide.
    keeps_logprobs: whether an evaluation returns the log-probability of every target.
    teacher: what batches have of a teacher, or what an evaluation that keeps log-probabilities returns as well.
    scores_s: predicted seconds of the log-probabilities of a batch; None if there are steps.
    reference: provides the weights of a reference that answers are compared with in the run; None: there is none.
    weights_folder: absolute; where a server that samples finds weights. None: there is no server.
    features: of the images that batches have.
    """

    config: TrainConfig
    source: ModelSource
    structure: ModelStructure
    plan: Plan
    weighted: bool = False
    keeps_logprobs: bool = False
    teacher: TopTokens | None = None
    scores_s: float | None = None
    reference: ModelSource | None = None
    weights_folder: Path | None = None
    features: FeatureFolders = NO_FEATURES

    @property
    def is_aliased(self) -> bool:
        """Return whether layers share host memory, as in a benchmark (bench/aliased_memory.py).

        What is computed then means nothing.
        """
        return self.structure.aliased_size is not None


@dataclass(frozen=True)
class PlanningProblem:
    """Holds the inputs of the planner.

    source: the model, with experts divided as in `structure`.
    activations: bytes of activations of a micro-batch of the requested size.
    machine: what the plan may use.
    request: what the configuration demands.
    """

    source: ModelSource
    structure: ModelStructure
    activations: ActivationBytes
    machine: Machine
    request: Request

    def plan(self) -> Plan:
        """Return the best plan. Raises CapacityError and ConfigError as `make_plan` does. The plan is computed once."""
        if isinstance(self._answer, CapacityError):
            raise self._answer
        return self._answer

    @cached_property
    def _answer(self) -> Plan | CapacityError:
        with no_collections():
            try:
                return plan_with_compression(self.structure, self.activations, self.machine, self.request)
            except CapacityError as error:
                return error

    @property
    def scores_s(self) -> float:
        """Return the predicted seconds of the log-probabilities of a batch. Raises CapacityError as `plan`."""
        return predict_scores(self.plan(), self.structure, self.activations, self.machine, self.request)

    @property
    def sampled_token_s(self) -> float:
        """Return the predicted seconds of a token of all completions that are sampled together. Raises as `plan`."""
        return predict_sampled_token(self.plan(), self.structure, self.activations, self.machine, self.request)

    @property
    def fits(self) -> bool:
        return isinstance(self._answer, Plan)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.structure.layers)

    @property
    def shortfall(self) -> float:
        """Return by how much the plan nearest to fitting exceeds the limits (planner/limits.py); 0 if a plan fits."""
        return self._answer.shortfall if isinstance(self._answer, CapacityError) else 0.0


def planning_problem(config: TrainConfig) -> PlanningProblem:
    """Return the planner's inputs as `megatrain plan` needs them: without weights, data or a GPU.

    Only the model's configuration is read. Raises ConfigError as a training would.
    """
    return _fitting_problem(config, _source_of(config), _machine(config, imagined=True))


def prepare(config: TrainConfig, machine: Machine | None = None, source: ModelSource | None = None) -> RunSpec:
    """Make the plan of a run.

    machine: machine with its rates and spill space; None: this machine, with the rates measured so far.
    source: what `read_model` found; None: read the model now.

    Raises CapacityError if no plan fits, and ConfigError.
    """
    source = _source_of(config, source)
    problem = _fitting_problem(config, source, machine or _machine(config, imagined=False))
    plan = problem.plan()
    split = config.with_split(plan.step.micro_batch_size, plan.step.num_micro_batches)
    scores_s = None if config.train.num_steps else problem.scores_s
    return RunSpec(split, problem.source.with_fills(), problem.structure, plan, scores_s=scores_s)


def predictor(config: TrainConfig, plan: Plan) -> Callable[[HardwareProfile], Prediction]:
    """Return a function that predicts the time of a run's plan from any hardware profile, on any machine.

    config: the run's configuration, resolved.
    plan: the run's plan.

    Raises ConfigError if the model no longer exists.
    """
    machine = Machine(plan.device, plan.compute.num_threads, 1, plan.limits.ram_bytes, plan.limits.hbm_bytes)
    problem = _problem_of_plan(config, plan, machine)

    def predict(profile: HardwareProfile) -> Prediction:
        disk = profile.disk_bytes_per_s or TYPICAL_DISK_BYTES_PER_S
        way = DiskWay(plan.disk.io, plan.disk.packed)
        plain, limit_bytes = profile.disk_plain_bytes_per_s, plan.limits.spill_bytes
        spill = None if limit_bytes is None else SpillSpace(limit_bytes, disk, way, plain)
        by_profile = replace(machine, profile=profile, spill=spill)
        return predict_plan(plan, problem.structure, problem.activations, by_profile, problem.request)

    return predict


def _machine(config: TrainConfig, *, imagined: bool) -> Machine:
    hardware = config.hardware
    check_profile(hardware.profile)  # first: a misspelt card would be told as a GPU that is missing
    host_gpus = hardware.num_gpus // hardware.num_hosts
    machine = with_profile(machine_of(hardware, imagined=imagined), hardware.profile, host_gpus)
    return with_spill(machine, config.spill, imagined=imagined)


def _source_of(config: TrainConfig, found: ModelSource | None = None) -> ModelSource:
    source = found or read_model(config.model)
    if config.train.objective == "reward":
        source = source.as_reward_model()
    elif source.architecture.is_reward:
        raise ConfigError(
            f"model.path: {config.model.path or 'model.config'} is a reward model "
            f"({', '.join(source.config['architectures'])}), which predicts no tokens; only train.objective: reward "
            "trains it"
        )
    source = checked(source).with_lora(config.lora)
    source = replace(source, fp8=config.train.compute == "fp8")
    check_length(config.data, source.num_positions)
    check_images(config.data, source, config.train.vision)
    return source


def _fitting_problem(config: TrainConfig, source: ModelSource, machine: Machine) -> PlanningProblem:
    """Return the planner's inputs, with blocks divided into parts if whole blocks do not fit the device.

    Among several numbers of parts, the one with the fastest predicted step is chosen. If nothing fits, the one with the
    smallest shortfall is returned.
    """
    parts, trials = config.hardware.block_parts, dict[int, Trials]()
    whole = _problem_of_parts(config, source, machine, 1 if parts == "auto" else parts, trials)
    if parts != "auto" or machine.device != "cuda" or config.train.vision != "frozen":
        return whole
    if whole.fits or not lacks_device_memory(whole.structure, whole.activations, machine, whole.request):
        return whole
    different: dict[tuple[str, ...], PlanningProblem] = {}
    for parts in BLOCK_PARTS:
        try:
            problem = _problem_of_parts(config, source, machine, parts, trials)
        except ConfigError as error:
            log.info("%s", error)
        else:
            different.setdefault(problem.layer_names, problem)
    best = min(different.values(), key=_predicted_s, default=whole)
    if _predicted_s(best) < math.inf:
        return best
    return min((whole, *different.values()), key=lambda problem: problem.shortfall)


def _problem_of_plan(config: TrainConfig, plan: Plan, machine: Machine) -> PlanningProblem:
    """Return the planner's inputs for which the plan was made.

    The plan stores how many parts blocks have, not how many were allowed, so the possible numbers are tried.
    """
    asked = config.hardware.block_parts
    numbers = [1] if plan.compute.block_parts == 1 else list(BLOCK_PARTS) if asked == "auto" else [asked]
    source, names = _source_of(config), tuple(layer.name for layer in plan.layers)
    for parts in numbers:
        problem = _problem_of_parts(config, source, machine, parts, {})
        if problem.layer_names == names:
            return problem
    raise ConfigError(f"the model's blocks are not divided any more as the plan has them: {', '.join(names[:4])}, …")


def _predicted_s(problem: PlanningProblem) -> float:
    """Return the predicted seconds of a step; infinite if nothing fits or nothing is predicted."""
    prediction = problem.plan().prediction if problem.fits else None
    return prediction.step_s if prediction else math.inf


def _problem_of_parts(
    config: TrainConfig, source: ModelSource, machine: Machine, block_parts: int, trials: dict[int, Trials]
) -> PlanningProblem:
    """Return the planner's inputs with blocks divided into at most `block_parts` parts.

    Experts are divided into as many groups. Each number of groups is another model, so `trials` are kept by that
    number.
    """
    groups = block_parts if active_experts(source) else 1
    source = replace(source, expert_groups=groups)
    hardware, (micro_batch_size, num_micro_batches) = config.hardware, config.split()
    compiled = compiles(config, machine.device)
    discovery = discover_with_attention(
        config, source, machine.device, compiled=compiled, block_parts=block_parts, trials=trials.setdefault(groups, {})
    )
    structure, activations = discovery.structure, discovery.activations
    _log_uncompiled(structure, activations)
    if config.train.steps != 0:  # null: of so many epochs; 0: only an evaluation
        check_tower(config.train.vision, structure)
    request = Request(
        precision=Precision.of(config.train.precision, config.train.moments),
        round_gradients=config.train.grad_dtype == "bf16",
        clip=config.train.clip is not None,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        seq_len=config.data.seq_len,
        num_shards=hardware.num_shards,
        hbm_layers=hardware.hbm_layers,
        saves=bool(config.save_interval),
        objective=objective_bytes(config.train, structure.vocab_size, compiled=compiled),
        scores_in_step=config.data.documents_per_record > 0 and config.train.objective != "reward",
        scores_first=config.train.estimates_kl,
        saves_frozen=config.lora is None,
        attention=discovery.attention,
        packed_attention=discovery.packed_attention,
        free_split=config.train.split_is_free,
        active_experts=active_experts(source),
        sliding_windows=windows(source, len(structure.blocks)),
        compiled=compiled,
        captured=_captured(config),
        num_gpus=hardware.num_gpus,
        num_hosts=hardware.num_hosts,
        gathers_slots=None if hardware.all_gather == "auto" else hardware.all_gather,
    )
    return PlanningProblem(source, structure, activations, machine, request)


def objective_bytes(train: OptimizationConfig, vocab_size: int, *, compiled: bool) -> ObjectiveBytes:
    """Return what the objective takes.

    Scores of which a teacher names some exist twice more in FP32, compiled or not.
    """
    if train.objective != "distill":
        return ObjectiveBytes(4 if train.z_loss and not compiled else 0)
    of_sft = 4 if train.distillation.sft_weight and not compiled else 0
    num_ids = min(train.distillation.top_k, vocab_size)
    return ObjectiveBytes(8 + of_sft, RecordSize(num_ids, num_ids + 1).kind.itemsize)


def _captured(config: TrainConfig) -> bool | None:
    """Return whether a step is captured as one CUDA graph; None if the plan decides.

    With several GPUs it is not, unless the setting is true: exchanges between GPUs are not part of a captured step. Nor
    is it with pairs or images, of which rows hold different numbers, or with a teacher, whose predictions no capture
    reads.
    """
    setting = config.hardware.cuda_graphs
    may_be = config.hardware.num_gpus == 1 and config.train.objective == "sft" and not config.data.images
    return setting if setting != "auto" else None if may_be else False


def _log_uncompiled(structure: ModelStructure, activations: ActivationBytes) -> None:
    """Log one line for each reason why layers are not compiled."""
    layers: dict[str, list[str]] = {}
    trials = activations.compiled  # empty if nothing is compiled
    for layer, trial in zip(structure.layers, trials, strict=False):
        if trial and trial.problem:
            layers.setdefault(trial.problem, []).append(layer.name)
    for problem, names in layers.items():
        log.info("not compiled: %d layers, %s to %s: %s", len(names), names[0], names[-1], problem)
