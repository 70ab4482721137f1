"""Finds the reference of a run that samples its answers, whose log-probabilities are computed within the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.driver.logprob_pass import ModelIdentity
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.evaluation_config import identity_of, naming_reference, run_of
from megatrain_ray.export.export import exported
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import checked, read_model
from megatrain_ray.planning.run_spec import RunSpec

# Settings of a configuration that change no log-probability.
IRRELEVANT_SETTINGS = frozenset(
    ("_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
     "transformers_version", "use_cache")
)  # fmt: skip


@contextmanager
def open_reference(config: TrainConfig, trained: ModelSource) -> Iterator[ModelSource | None]:
    """Yield the model that train.reference names for sampled answers, checked; it stays for the block.

    None: the run computes no log-probabilities of a reference, or they are those of its own model. A save of a run is
    exported for it, into that run's directory. This imports Transformers only if there is such a model.

    Raises ConfigError for a model of another shape than `trained`, and as export_run.
    """
    if (name := _other_model(config)) is None:
        yield None
        return
    with ExitStack() as stack:
        files = run_of(name)
        path = name if files is None else str(stack.enter_context(exported(files.path)))
        with naming_reference(config.train):
            source = checked(_read_reference(name, _at(path, config), trained))
        yield source


def check_reference(config: TrainConfig) -> None:
    """Raise ConfigError as open_reference does, but export nothing: a run has the shape of the model it began with."""
    if (name := _other_model(config)) is not None:
        files, trained = run_of(name), read_model(config.model)
        with naming_reference(config.train):
            _read_reference(name, _at(name, config) if files is None else files.read_config().model, trained)


def _other_model(config: TrainConfig) -> str | None:
    """Return the name of a reference of sampled answers that is another model; None if there is none."""
    name = config.train.reference_model
    return None if config.train.rollouts is None or name == "model" else name


def _at(path: str, config: TrainConfig) -> ModelConfig:
    return config.model.model_copy(update={"path": path, "config": None})


def _read_reference(name: str, model: ModelConfig, trained: ModelSource) -> ModelSource:
    """Read the configuration of a reference. Raises ConfigError if the trained model's code would compute it wrongly.

    name: by which the user knows it.
    """
    source = read_model(model)
    theirs, ours = (one.architecture.config.to_dict() for one in (source, trained))
    for key in sorted((theirs.keys() | ours.keys()) - IRRELEVANT_SETTINGS):
        if theirs.get(key) != ours.get(key):
            raise ConfigError(
                f"train.reference: {name} has {key}: {theirs.get(key)!r:.60}, and the model that is trained "
                f"{ours.get(key)!r:.60}; with data.kind: prompts both must have one shape: name such a model"
            )
    return source


def reference_weights(
    config: TrainConfig, base: ModelConfig, run_spec: RunSpec, run_dir: Path, found: ModelSource | None
) -> ModelSource | None:
    """Return the source of the reference's weights for the trained model's code; None: the run computes none.

    A warning tells if it is another model than at the last start of the run in `run_dir`.

    base: the model that the run began with, without adapters.
    found: by `open_reference`.

    Raises ConfigError for weights that are missing or of other shapes.
    """
    name = config.train.reference_model
    if config.train.rollouts is None or name is None:
        return None
    own = replace(run_spec.source, adapter=None)  # new pairs change nothing
    if found is not None:
        own = replace(own, folder=found.folder, hub=found.hub, names=found.names, prefix=found.prefix)
        with naming_reference(config.train):
            own.check_weights(run_spec.structure)
    identity = identity_of(None if found is None else name, config.model_copy(update={"model": base}))
    warn_of_change(run_dir / "reference.json", identity)
    return own


def warn_of_change(file: Path, identity: ModelIdentity) -> None:
    """Warn if the reference is not what `file` says of the last start, and write what it is now."""
    now = json.dumps(identity, sort_keys=True, default=str)
    with explained("write", file):
        if file.exists() and file.read_text(encoding="utf-8") != now:
            say(
                "warning: the reference is another model than at the last start of this run, or its files were moved "
                "(train.reference, or model.path): from here on answers are compared with this one"
            )
        write_atomically(file, now)
