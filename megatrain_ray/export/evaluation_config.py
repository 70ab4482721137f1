"""Makes configurations of runs that only evaluate a model: no update, and nothing that an update would need."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.data.data_sources import naming_held_out
from megatrain_ray.driver.logprob_pass import ModelIdentity
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export import SaveChoice, choose_save, exported
from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.io.files.scratch_folder import scratch_folder
from megatrain_ray.io.saves.manifest import MANIFEST_NAME
from megatrain_ray.io.saves.save_folder import save_folder
from megatrain_ray.model.open_model import read_model
from megatrain_ray.run.run_files import RunFiles

# Settings of the training that an evaluation has no use for, and those that it makes itself.
OWN: Mapping[str, Any] = {
    "save_every": None, "save_keep_every": None, "save_best": False, "save_mirror": None, "eval_every": 1,
    "eval_patience": None, "log": {"tensorboard": False, "prometheus": False},
}  # fmt: skip
OWN_TRAIN: Mapping[str, Any] = {
    "steps": 0, "epochs": None, "warmup_steps": 0, "groups": (), "optimizer": "adamw", "muon": {}, "moments": "fp32",
}  # fmt: skip


@contextmanager
def evaluation_config(name: str, config: TrainConfig, step: SaveChoice = None) -> Iterator[TrainConfig]:
    """Yield the configuration of a run of no steps, in a temporary folder, which lasts as long as the block.

    A run's save is exported for it, into the run's directory. Its adapters stay adapters, so that the loss has the bits
    that the run itself computes.

    name: a run directory, a Hugging Face folder or a hub id.
    config: has the held-out data, and everything else of the evaluation but the model.
    step: of the run's save, as in export_run.

    Raises ConfigError, and as export_run.
    """
    data = config.data
    if data.held_out is None:
        raise ConfigError("data.eval_path is required: files to evaluate on, given as data.path is; or eval_fraction")
    # Its tokens are needed anyway, and those of the training data are not.
    whole = {"stream": None, "stream_portion": None}
    update = {} if data.eval_path is None else {"path": data.eval_path, "dataset": data.eval_dataset, **whole}
    # Answers that are sampled now are compared with no reference.
    train: Mapping[str, Any] = {"policy": {}, "reference": None} if data.kind == "prompts" else {}
    # What is read as the training data are the held-out ones as well.
    naming = nullcontext() if data.eval_path is None else naming_held_out(data.held_out)
    with naming, _without_updates(name, config, step, update, train) as changed:
        yield changed


@contextmanager
def naming_reference(train: OptimizationConfig) -> Iterator[None]:
    """Rename model.path in a ConfigError of the block to the key that names the reference or teacher."""
    try:
        yield
    except ConfigError as error:
        key = "train.distillation.teacher" if train.objective == "distill" else "train.reference"
        raise ConfigError(*(re.sub(r"^model\.path\b", key, line) for line in error.args)) from None


@contextmanager
def pass_config(
    name: str | None, config: TrainConfig, step: SaveChoice = None, *, imagined: bool = False
) -> Iterator[TrainConfig]:
    """Yield the configuration of a run of no steps, as evaluation_config does, for a pass over data that are tokenised.

    name: as for evaluation_config; None: the model of `config` without adapters.
    imagined: nothing but a plan is wanted, so that nothing is written.

    Raises as export_run.
    """
    data = config.data
    _check_answered(data)
    update = {} if config.evaluates else {"eval_path": data.path, "eval_dataset": data.dataset, "eval_fraction": None}
    # Any objective over such data will do.
    objective = {"pairs": "simpo", "unpaired": "kto", "rollouts": "grpo"}.get(data.kind, "sft")
    numbers: dict[str, Any] = {"preference": {}, "policy": {}, "distillation": {}}
    train = {"reference": None, "objective": objective, **numbers}
    with _without_updates(name, config, step, update, train, imagined=imagined) as changed:
        yield changed


def _check_answered(data: DataConfig) -> None:
    """Raise ConfigError for prompts, which have no targets."""
    if data.kind == "prompts":
        raise ConfigError(
            "data.kind: prompts: without answers there is nothing to compute; give a configuration of answers, such as "
            "data.kind: rollouts with the files in a run's rollouts/"
        )


@contextmanager
def _without_updates(
    name: str | None, config: TrainConfig, step: SaveChoice, data: Mapping[str, Any], train: Mapping[str, Any],
    *, imagined: bool = False,
) -> Iterator[TrainConfig]:  # fmt: skip
    """Yield a configuration without updates. `data`, `train`: settings that replace those of `config`."""
    tree, files = config.model_dump(), run_of(name)
    with ExitStack() as stack:
        run_dir = config.run_dir if imagined else str(stack.enter_context(scratch_folder("eval")) / "run")
        tree |= {**OWN, "run_dir": run_dir}
        tree["train"] |= {**OWN_TRAIN, **train}
        if files is not None:
            of_run = files.read_config()
            _check_objective(str(name), tree["train"], is_reward=of_run.train.objective == "reward")
            folder = None if imagined else stack.enter_context(exported(files.path, step=step, merge=False))
            tree |= _of_run(of_run, folder, tree["train"], images=config.data.images)
        else:
            tree |= _of_model(_model_of(name, config, step), tree["train"]) | {"lora": None}
        tree["data"] |= data
        yield TrainConfig.model_validate(tree)


def identity_of(name: str | None, config: TrainConfig, step: SaveChoice = None) -> ModelIdentity:
    """Return what the weights of a model are recognised by, after fetching them. The arguments are pass_config's.

    Raises ConfigError for a model or save that is not there.
    """
    if (files := run_of(name)) is not None:
        manifest = save_folder(files.saves, choose_save(files, step)) / MANIFEST_NAME
        saved, of_files = {"save": hashlib.sha256(manifest.read_bytes()).hexdigest()}, [file_identity(manifest)]
        if (run := files.read_config()).lora is None:
            return ModelIdentity(saved, of_files)
        base = _identity(run.model)  # which the save of adapters lacks
        return ModelIdentity(saved | base.settings, of_files + base.files)
    return _identity(_model_of(name, config, step))


def _identity(model: ModelConfig) -> ModelIdentity:
    source = read_model(model)
    code = sorted(source.code.glob("*.py")) if source.code else []
    settings = {"config": source.config, "seed": source.seed if source.folder is None else None}
    return ModelIdentity(settings, [file_identity(path) for path in (*source.weight_paths(), *code)])


def tower_of(name: str | None) -> ModelConfig | None:
    """Return the model that a run began with, if its saves have the same vision tower: if the run kept that frozen.

    Each export of a save is another file, for which the cache holds no features of images.

    name: as for pass_config.
    """
    if (files := run_of(name)) is None:
        return None
    run = files.read_config()
    return run.model if run.train.vision == "frozen" else None


def run_of(name: str | None) -> RunFiles | None:
    """Return the files of the run that a name means; None if it means a model."""
    files = RunFiles(Path(name or "").absolute())
    return files if name is not None and files.holds_run else None


def _model_of(name: str | None, config: TrainConfig, step: SaveChoice) -> ModelConfig:
    """Return the settings of the model that a name means; None: of `config`. Raises ConfigError if `step` is set."""
    if step is not None:
        raise ConfigError(f"--step and --best name a save of a run, and {name or 'model.path'} is no run directory")
    return config.model if name is None else config.model.model_copy(update={"path": name, "config": None})


def _of_run(config: TrainConfig, folder: Path | None, train: Mapping[str, Any], *, images: bool) -> dict[str, Any]:
    """Return model, adapters and train. Raises ConfigError for adapters in a vision tower that runs for no image.

    folder: of the exported save; None: what the run began with will do.
    images: whether the data hold images.
    """
    path = {} if folder is None else {"path": str(folder)}
    if config.lora is None:
        model = config.model.model_copy(update=path and {**path, "config": None})
        return _of_model(model, train) | {"lora": None}
    if config.train.vision != "frozen" and not images:
        raise ConfigError(
            f"{config.run_dir}: its adapters are in the vision tower or the projector as well (train.vision: "
            f"{config.train.vision}); set data.images: true, with which texts are read, too, or export it with --merge "
            "and name that folder"
        )
    trained = {key: getattr(config.train, key) for key in ("trainable", "freeze", "vision")}
    lora = config.lora.model_copy(update=path).model_dump()
    return {"model": config.model.model_dump(), "lora": lora, "train": {**train, **trained}}


def _of_model(model: ModelConfig, train: Mapping[str, Any]) -> dict[str, Any]:
    """Return model and train. All is frozen but the smallest thing, so that there is next to no optimizer state."""
    source = read_model(model)
    _check_objective(model.path or "model.config", train, is_reward=source.architecture.is_reward)
    empty = build_empty(source.factory, torch.float32)
    trained = {"trainable": (f"^{re.escape(_last_vector(empty))}$",), "freeze": ()}
    return {"model": model.model_dump(), "train": {**train, **trained}}


def _check_objective(name: str, train: Mapping[str, Any], *, is_reward: bool) -> None:
    """Raise ConfigError if of the model that `name` means and of train.objective only one is of rewards."""
    if train["objective"] == "reward" and not is_reward:
        raise ConfigError(f"{name} is no reward model, so its scores would be random; name one, or the run of one")
    if is_reward and train["objective"] != "reward":
        raise ConfigError(
            f"model.path: {name} is a reward model, which predicts no tokens; name a model that does, or evaluate this "
            "one with train.objective: reward"
        )


def _last_vector(model: nn.Module) -> str:
    """Return the name of the last parameter of one dimension outside of lists of layers, which is the last norm.

    If the model has none, it is the last parameter.
    """
    from transformers import PreTrainedModel  # takes 3 s to import, and a start imports this module

    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    inside = {id(p) for m in model.modules() if isinstance(m, nn.ModuleList) for p in m.parameters()}
    of_text = {id(p) for p in decoder.parameters()}
    names = [name for name, p in model.named_parameters() if id(p) in of_text]
    vectors = [name for name in names if (p := model.get_parameter(name)).dim() == 1 and id(p) not in inside]
    return (vectors or names)[-1]
