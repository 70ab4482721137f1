"""Loads the model of a run, of a Hugging Face folder or of a hub repository, to generate with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from megatrain_ray.config.groups import HardwareConfig
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import spinner
from megatrain_ray.engine.model.images import VISION_FAMILIES
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export import SaveChoice, exported, load_exported
from megatrain_ray.io.chat.chat_template import FALLBACK, ChatTemplate, load_chat_template
from megatrain_ray.io.chat.template_ending import EndMarks, find_end_marks
from megatrain_ray.io.checkpoints.hub import find_on_hub
from megatrain_ray.io.checkpoints.peft_adapter import CONFIG_NAME
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, fetch_weights
from megatrain_ray.io.images.image_processor import ImageProcessor, holds_processor
from megatrain_ray.io.tokens.tokenizer import holds_tokenizer, tokenizer_folder
from megatrain_ray.machine.machine import unused_gpu
from megatrain_ray.model.architecture import is_reward_model
from megatrain_ray.model.open_model import GENERATION_NAME
from megatrain_ray.read_file import check_folder, parse_json
from megatrain_ray.run.run_files import RunFiles, no_run
from megatrain_ray.units import format_count


@dataclass(frozen=True)
class LoadedModel:
    """Holds a model that generates, and what turns texts into its prompts.

    model: a PreTrainedModel. What has no room on the GPU is in host memory, and what has none there on disk.
    device: where prompts must be: cuda or cpu.
    processor: of images; None: it takes none, or its type is not compared with plain Transformers.
    marks: the ends of an answer with a chat template, else of a text.
    """

    model: Any
    device: str
    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    template: ChatTemplate
    marks: EndMarks


@contextmanager
def loaded(name: str, *, chat: bool, step: SaveChoice = None) -> Iterator[LoadedModel]:
    """Load the model that a run directory, a folder or a hub id means.

    chat: whether it shall answer chats, for which it needs a chat template.
    step: of the run's save, as in export_run.

    Raises ConfigError if there is no such model or it has no tokenizer or template, and as export_run.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it names what it moves, as `_device_of` does
    files = RunFiles(Path(name).absolute())
    if not files.holds_run:
        if files.path.is_file():
            raise ConfigError(no_run(files.path))
        if step is not None:
            raise ConfigError(f"--step and --best name a save of a run, and {name} is no run directory")
        yield _load(_model_folder(name), name, {}, chat=chat)
        return
    config = files.read_config()
    if config.train.objective == "reward":
        raise _scores_only(name)
    data = config.data
    if data.has_chats and not chat:
        say("the run learned chats: --chat asks it as it was trained")
    with ExitStack() as stack:
        with spinner("exporting a save"):
            folder = stack.enter_context(exported(files.path, step=step))
        model = _load(folder, name, data.chat_template_args, chat=chat)
        yield replace(model, template=replace(model.template, in_parts=True)) if data.images else model


def _model_folder(name: str) -> Path:
    """Return the folder with a config.json that a name means, after fetching the files of a hub repository."""
    hub = find_on_hub(name, "RUN_OR_FOLDER", "config.json", [GENERATION_NAME, INDEX_NAME])
    folder = hub.path if hub else Path(name)
    if (folder / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{name} holds adapters without their model: name the run, or export it with --merge and name that folder"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{name} is neither a run directory nor a model's folder: it has no config.json")
    if hub:
        fetch_weights(hub)
        tokenizer_folder(name)
    return folder


def _load(folder: Path, name: str, template_arguments: Mapping[str, Any], *, chat: bool) -> LoadedModel:
    if not holds_tokenizer(folder):
        raise ConfigError(f"{name} has no tokenizer.json, so texts cannot be turned into its token ids")
    template = load_chat_template(str(folder), None, template_arguments)
    if chat and template.name == FALLBACK:
        raise ConfigError(f"{name} has no chat template: leave --chat out, or name a model that was trained on chats")
    with spinner("loading the model"):
        try:
            check_folder(folder)
            settings = parse_json((folder / "config.json").read_bytes())
            if isinstance(settings, dict) and is_reward_model(settings):
                raise _scores_only(name)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = load_exported(folder, device_map="auto")
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"Transformers cannot load {name}: {type(error).__name__}: {error}") from error
    takes_images = model.config.model_type in VISION_FAMILIES and holds_processor(folder)
    processor = ImageProcessor(folder) if takes_images else None
    return LoadedModel(model, _device_of(model), tokenizer, processor, template, find_end_marks(folder, chats=chat))


def _scores_only(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is a reward model, which scores answers and generates none: evaluate it by megatrain eval, or export "
        "it and score with AutoModelForSequenceClassification in Transformers"
    )


def _device_of(model: Any) -> str:
    """Return the device that computes, and warn about what it has no room for."""
    sizes = dict.fromkeys(("cuda", "cpu", "meta"), 0)  # meta: is copied from elsewhere when it is needed
    for parameter in model.parameters():
        sizes[parameter.device.type] += parameter.numel()
    if warning := unused_gpu(HardwareConfig()):
        say(warning)
    device = "cuda" if sizes["cuda"] else "cpu"
    if sizes["meta"]:
        say(
            f"warning: {format_count(sizes['meta'])} of {format_count(sum(sizes.values()))} parameters have no room in "
            f"the {'GPU' if sizes['cuda'] else 'host'}'s memory: they are copied there again for every token, which "
            "is slow"
        )
    return device
