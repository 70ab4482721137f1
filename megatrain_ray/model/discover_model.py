"""Finds a model's structure as a run uses it: with the attention and compiled layers that its settings give.

Tracing what compiled layers keep for the backward, and importing the compiler, takes seconds of a start: it is cached.
A file is named by a hash of everything that the trace depends on: the model's configuration, shapes and rules, and the
versions and sources of the code that traces. Models with code of their own are not cached, because that code can change
without changing the hash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch._functorch import config as functorch_config

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.device.cards import cards
from megatrain_ray.engine.device.cuda_info import compute_capability, device_name
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.compile_trial import CompileTrial
from megatrain_ray.engine.discovery.discover import Trials, discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.attention import Attention, flex_problem
from megatrain_ray.engine.model.fp8_products import fp8_problem
from megatrain_ray.engine.model.parameter_rules import ParameterRules
from megatrain_ray.engine.model.structure import ModelStructure, build_empty
from megatrain_ray.engine.planner.memory.chunk_sizes import may_chunk
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.model.engine_settings import rules_of
from megatrain_ray.model.model_source import ModelSource

log = logging.getLogger(__name__)

FP8_CAPABILITY = 8, 9
KEPT_FILES = 64  # files of at most about 100 KB each; older ones are deleted

CompileTrials = tuple[CompileTrial | None, ...]
_TRIALS = TypeAdapter[CompileTrials](CompileTrials)


def compiles(config: TrainConfig, device: str) -> bool:
    """Return whether layers are compiled, as hardware.compile and the device decide."""
    setting = config.hardware.compile
    return setting if setting != "auto" else device == "cuda" and not config.train.deterministic


class Discovery(NamedTuple):
    """Holds a model's structure, its activation bytes per micro-batch, and the attention that its layers use.

    attention: for steps whose rows hold one document each.
    packed_attention: for steps whose rows hold several documents.
    """

    structure: ModelStructure
    activations: ActivationBytes
    attention: Attention
    packed_attention: Attention


def discover_with_attention(
    config: TrainConfig, source: ModelSource, device: str, *, compiled: bool, block_parts: int, trials: Trials
) -> Discovery:
    """Run `discover` with the attention that the settings and the device allow.

    The longer a row is, the more its attention masks cost, so flex attention replaces them where it can.
    """
    (size, number), seq_len, packed = config.split(), config.data.seq_len, config.data.packing
    _check_fp8(config, source, device)
    shape = Precision(config.train.precision).working_dtype, size, seq_len
    tokens = size * seq_len * (number if config.train.split_is_free else 1)  # upper bound for a micro-batch
    chunked = may_chunk(tokens, seq_len, has_disk=config.spill.path is not None)
    find = partial(
        _find, source, shape, rules_of(config), trials, chunked=chunked, block_parts=block_parts,
        images=config.data.images, tower=config.train.vision != "frozen",
    )  # fmt: skip
    sdpa, flex = Attention.SDPA, Attention.FLEX
    if not _may_use_flex(config, source, device):
        return Discovery(*find(packed=packed, compiled=compiled), sdpa, sdpa)
    if packed:
        _, activations = find()
        unpacked = flex if activations.masks else sdpa
        return Discovery(*find(attention=flex, packed=True, compiled=compiled), unpacked, flex)
    structure, activations = find(compiled=compiled)
    if activations.masks:
        return Discovery(*find(attention=flex, compiled=compiled), flex, flex)
    return Discovery(structure, activations, sdpa, sdpa)


def _find(
    source: ModelSource, shape: tuple[torch.dtype, int, int], rules: ParameterRules, trials: Trials, *,
    attention: Attention = Attention.SDPA, packed: bool = False, compiled: bool = False, chunked: bool = False,
    images: bool = False, tower: bool = False, block_parts: int = 1,
) -> tuple[ModelStructure, ActivationBytes]:  # fmt: skip
    """Run `discover`, taking the trials of compiled layers from the cache if it has them."""
    how: dict[str, Any] = {"attention": attention, "packed": packed, "chunked": chunked, "images": images}
    how |= {"tower": tower}
    if not compiled or block_parts > 1:
        return discover(source.factory, *shape, rules, **how, block_parts=block_parts, trials=trials)
    cache = TrialCache(source, {"shape": shape, "rules": rules, **how})
    known = cache.read()
    structure, activations = discover(source.factory, *shape, rules, **how, compiled=known is None, trials=trials)
    if known is not None:
        return structure, activations.with_trials(known)
    cache.write(activations.trials)
    return structure, activations


def _check_fp8(config: TrainConfig, source: ModelSource, device: str) -> None:
    """Raise ConfigError if the model computes in FP8 and this machine's device cannot. An absent GPU is not checked."""
    if not source.fp8:
        return
    if device == "cuda":
        card = cards().get(config.hardware.profile)
        if card is not None and not card.fp8:
            raise ConfigError(
                f"train.compute: fp8: hardware.profile names the {card.gpu}, which has no FP8; name another"
            )
        found = None if card else compute_capability()  # a card that is named need not be here
        if found is not None and found < FP8_CAPABILITY:
            raise ConfigError(
                f"train.compute: fp8 needs a GPU of compute capability {_dotted(FP8_CAPABILITY)} or more (H100, RTX 40 "
                f"and later), and {device_name()} has {_dotted(found)}; leave the key out"
            )
    elif problem := fp8_problem(torch.device(device)):
        raise ConfigError(
            f"train.compute: fp8: torch {torch.__version__} has no such products on this CPU: {problem}; leave it out"
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _may_use_flex(config: TrainConfig, source: ModelSource, device: str) -> bool:
    """Return whether flex attention can be used. Raises ConfigError if the settings demand it and it cannot."""
    setting = config.model.attention
    if setting == "sdpa" or (setting == "auto" and device != "cuda"):
        return False
    problem = flex_problem(build_empty(source.factory, torch.float32), config.data.seq_len)
    if device != "cuda":
        problem = "it computes gradients on a GPU only"
    if problem is not None and setting == "flex":
        raise ConfigError(f"model.attention: flex attention is not possible here: {problem}; set model.attention: auto")
    if problem is not None:
        log.info("no flex attention: %s; rows of several documents get whole masks", problem)
    return problem is None


class TrialCache:
    """Caches the trials of one model in one shape."""

    def __init__(self, source: ModelSource, shape: Mapping[str, Any]) -> None:
        """Find the file of the trials.

        shape: all other arguments of `discover`, as objects that `repr` shows completely.
        """
        self._file: Path | None = None
        if source.code is None:
            model = dict(source.config), repr(source.lora), source.fp8
            key = json.dumps([*model, sorted(map(repr, shape.items())), _versions()], default=repr)
            name = hashlib.sha256(key.encode()).hexdigest()[:24]
            with suppress(RuntimeError):  # a user without a home has no cache
                self._file = cache_folder() / "trials" / f"{name}.json"

    def read(self) -> CompileTrials | None:
        """Return the cached trials; None if there are none, or none that can be read."""
        try:
            return _TRIALS.validate_json(self._file.read_bytes()) if self._file else None
        except (OSError, ValidationError):
            return None

    def write(self, trials: CompileTrials) -> None:
        """Cache the trials, unless a layer could not be compiled: such a failure may be temporary."""
        if self._file is None or any(trial and trial.problem for trial in trials):
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, _TRIALS.dump_json(trials).decode())
            newest_first = sorted(self._file.parent.glob("*.json"), key=lambda file: -file.stat().st_mtime)
            for file in newest_first[KEPT_FILES:]:
                file.unlink(missing_ok=True)
        except (OSError, MegatrainError) as error:
            log.info("what compiled layers keep is not kept: %s", error)


@cache
def _versions() -> list[str]:
    """Return the versions of everything that traces.

    Of this package it is a hash of every source, since a checkout changes without changing its version.
    """
    import transformers

    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.read_bytes())
    cpu = platform.machine(), torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, transformers.__version__, *cpu, functorch_config.get_hash().hex(), digest.hexdigest()]


def sources() -> list[Path]:
    """Return the source files of this package."""
    package = Path(__file__).parents[1]
    return sorted([*package.glob("*.py"), *package.glob("*/**/*.py")])  # a leading ** would not enter linked folders
