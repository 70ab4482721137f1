"""Translates what LLaMA-Factory and Axolotl set for images and streams of data, once their data sets are translated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain_ray.config.checks import KINDS_OF_KEY
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.convert.conversions import RefusedError
from megatrain_ray.convert.key_tables import Findings, Table
from megatrain_ray.errors import ConfigError

FREEZING_IMAGES = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_mm_modules")
PROJECTOR = r"visual\.(merger|deepstack_merger_list)\.|multi_modal_projector\.|embed_vision\."
# How LLaMA-Factory's templates begin that write images.
IMAGE_TEMPLATES = (
    "gemma3", "gemma4", "glm4v", "intern_vl", "llava", "mistral_small", "qwen2_vl", "qwen3_vl", "qwen3_5",
)  # fmt: skip
STREAM_SIZE = "20GB"  # Neither tool limits it


def translate_images(table: Table, found: Findings, tree: Mapping[str, Any]) -> None:
    """Set train.vision if the data sets hold images (data.images). Drop what the tool freezes of them otherwise.

    tree: the tool's configuration file.
    """
    settings = found.settings
    freezing = {key: bool(settings.pop(key)) for key in FREEZING_IMAGES if key in settings}
    if settings.get("data.kind", "sft") not in KINDS_OF_KEY["images"] or not settings.get("data.images"):
        settings.pop("data.images", None)
        found.meaningless |= {key: "of data with images" for key in freezing if key in tree}
        return
    try:
        vision = _axolotl(settings, freezing) if table.tool == "Axolotl" else _llama_factory(settings, freezing)
    except RefusedError as error:
        found.refused.append(str(error))
        return
    if vision != "frozen":
        settings["train.vision"] = vision
    if table.tool != "Axolotl":
        found.otherwise["dataset"] = (
            "images have the size that the model's processor gives them; LLaMA-Factory reduces them to "
            "image_max_pixels before, 589,824 unless set"
        )


def _llama_factory(settings: dict[str, Any], freezing: Mapping[str, bool]) -> str:
    """Return train.vision. A projector that is frozen beside a trained tower becomes train.freeze."""
    tower, projector = freezing["freeze_vision_tower"], freezing["freeze_multi_modal_projector"]
    method = settings.get("method")
    if method == "freeze" and not (tower and projector):
        raise RefusedError(
            "finetuning_type: freeze: goes with a frozen vision tower and projector here; for others set train.vision "
            "and train.trainable by hand"
        )
    if tower:
        return "frozen" if projector or method == "lora" else "projector"  # its adapters are not on projectors
    if projector and method == "full":
        settings["train.freeze"] = [PROJECTOR]
    return "all"


def _axolotl(settings: Mapping[str, Any], freezing: Mapping[str, bool]) -> str:
    """Return train.vision: Axolotl trains the whole model, or those parts that its patterns match."""
    patterns = [] if settings.get("every_linear") else settings.get("lora.match") or settings.get("train.trainable", [])
    of_text = bool(patterns) and all("language_model" in pattern for pattern in patterns)
    return "frozen" if freezing.get("freeze_mm_modules") or of_text else "all"


def set_stream(settings: dict[str, Any], found: Findings) -> None:
    """Set data.stream if it goes with the other `settings`, a tree of ours. Otherwise note why it does not."""
    data = {**settings["data"], "stream": STREAM_SIZE}
    try:
        TrainConfig.model_validate({**settings, "data": data})
    except ConfigError as error:
        found.otherwise["streaming"] = f"data are tokenised whole before training, since {'; '.join(error.args)}"
        return
    settings["data"] = data
    found.otherwise["streaming"] = f"at most {STREAM_SIZE} of the data lie on disk; change data.stream for another size"
