"""Turns images into what a model takes, by the model's own processor in Transformers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import read_settings

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
SETTINGS_NAME = "tokenizer_config.json"
TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class ImageProcessor:
    """Processes images one by one, so that what an image becomes does not depend on others. Picklable.

    folder: of the model, with its processor's files.
    """

    folder: Path

    def settings(self) -> dict[str, Any]:
        """Return what processes images, as data for JSON: the files are the tokenizer's. Raises ConfigError."""
        processor = load_processor(self.folder)
        return {"images": [type(processor).__name__, type(processor.image_processor).__name__]}

    @property
    def image_token_id(self) -> int:
        """Return the id of the tokens that an image becomes."""
        processor = load_processor(self.folder)
        # Gemma 3's processor itself names the token that a template writes, which becomes these and others.
        return int(getattr(processor.tokenizer, "image_token_id", None) or processor.image_token_id)

    @property
    def placeholder(self) -> str:
        """Return the text that a chat template writes for an image."""
        return str(load_processor(self.folder).image_token)

    @property
    def joins_adjacent(self) -> bool:
        """Return whether a model with such a processor takes images for one whose tokens follow each other at once."""
        return "image_grid_thw" in load_processor(self.folder).image_processor.model_input_names

    def text_of(self, content: bytes) -> str:
        """Return the text that replaces the placeholder of an image. Raises RecordError if it is no whole image."""
        (found,) = self._processed([content], return_text_replacement_offsets=True)["text_replacement_offsets"]
        return str(found[0]["replacement"])

    def inputs_of(self, *contents: bytes) -> tuple[dict[str, Any], int]:
        """Return the tensors that the model's vision tower takes of images, and their tokens. Raises RecordError."""
        found = self._processed(contents, return_tensors="pt")
        num_tokens = int((found["input_ids"] == self.image_token_id).sum())
        return {name: value for name, value in found.items() if name not in TEXT_OUTPUTS}, num_tokens

    def _processed(self, contents: Sequence[bytes], **wanted: Any) -> Any:
        processor, images = load_processor(self.folder), [_opened(content) for content in contents]
        try:
            return processor(images=images, text=[processor.image_token * len(images)], **wanted)
        except Exception as error:  # it may raise anything: Qwen's raises ValueError for a very long image
            raise RecordError(f"the model's processor refuses it: {error}") from None


def _opened(content: bytes) -> Any:
    """Return a whole image in RGB, turned as its camera says, as Transformers loads it. Raises RecordError."""
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        with warnings.catch_warnings(action="ignore"):  # of many pixels, or of what a palette loses
            image = Image.open(io.BytesIO(content))
            image.load()
            return load_image(image)
    except Image.DecompressionBombError as error:
        raise RecordError(f"{str(error).partition(',')[0]}; make it smaller") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and others
        reason = "it is of no known format" if "cannot identify" in str(error) else error
        raise RecordError(f"it cannot be decoded: {reason}") from None


def holds_processor(folder: Path) -> bool:
    """Return whether a folder has a file that says how a model takes images."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


@cache
def load_processor(folder: Path) -> Any:
    """Return the model's own processor without its parts for videos, which need torchvision, and sounds.

    Raises ConfigError.
    """
    if not holds_processor(folder):
        raise ConfigError(
            f"data.images: {folder} has none of {', '.join(PROCESSOR_FILES)}, which say how the model takes images; "
            "set data.tokenizer to the model's whole folder"
        )
    from transformers import ProcessorMixin

    if not hasattr(ProcessorMixin, "replace_image_token"):
        raise ConfigError("data.images: Transformers 5.17 or later is needed; update it, or leave the key out")
    try:
        return _without_others(_class_of(folder)).from_pretrained(folder)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        hint = "" if find_spec("torchvision") else "; if it needs torchvision, install that"
        raise ConfigError(f"data.images: cannot load the processor in {folder}: {reason}{hint}") from None


def _class_of(folder: Path) -> Any:
    """Return the class of a folder's processor: the one that its settings name, else that of the model's type."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    named = [read_settings(folder / name).get("processor_class") for name in (*PROCESSOR_FILES, SETTINGS_NAME)]
    found = next((kind for name in named if name and (kind := getattr(transformers, name, None))), None)
    return found or PROCESSOR_MAPPING[type(transformers.AutoConfig.from_pretrained(folder))]


def _without_others(whole: Any) -> Any:
    """Return the class of a processor with None in place of its parts for videos and sounds.

    Some processors have no such arguments unless they have all of their parts.
    """
    reader: Any = type(whole.__name__, (whole,), {"get_attributes": classmethod(_parts_for_images)})

    def read_parts(_: Any, *args: Any, **kwargs: Any) -> list[Any]:
        read = reader._get_arguments_from_pretrained(*args, **kwargs)
        parts = dict(zip(reader.get_attributes(), read, strict=True))
        return [parts.get(name) for name in whole.get_attributes()]

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else whole.check_argument_for_proper_class(self, name, part)

    methods = {"_get_arguments_from_pretrained": classmethod(read_parts), "check_argument_for_proper_class": check}
    return type(whole.__name__, (whole,), methods)


def _parts_for_images(kind: Any) -> list[str]:
    return [name for name in super(kind, kind).get_attributes() if name in ("image_processor", "tokenizer")]
