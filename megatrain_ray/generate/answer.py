"""Generates what follows a prompt, and says whether it ended by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TextStreamer

from megatrain_ray.engine.model.images import VISION_FAMILIES, token_types
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export import listed_ids
from megatrain_ray.generate.load_model import LoadedModel
from megatrain_ray.io.chat.chat_template import Message
from megatrain_ray.io.chat.mark_turns import render_prompt
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.images.image_processor import PROCESSOR_FILES
from megatrain_ray.io.images.replaced_images import ReplacedText, check_places
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.image_files import StoredImage
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from megatrain_ray.model.positions import positions_of


@dataclass(frozen=True)
class Sampling:
    """Says how tokens are chosen and how many are generated at most.

    temperature: 0 takes the likeliest token; None: as the model's generation_config.json says.
    top_p: samples only from the likeliest tokens with this probability together; None: as that file says.
    repetition_penalty: divides the logits of tokens that were there before; None: as that file says.
    """

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of Transformers' `generate`."""
        penalty = {} if self.repetition_penalty is None else {"repetition_penalty": self.repetition_penalty}
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **penalty}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {**({"do_sample": True, **chosen} if chosen else {}), **penalty}


class EncodedPrompt(NamedTuple):
    """Holds the ids of a prompt, and its images in order."""

    ids: list[int]
    images: tuple[StoredImage, ...] = ()


class Answer(NamedTuple):
    """Holds a generated text. `ended`: at an end mark, not because it reached the largest number of tokens."""

    text: str
    ended: bool


def encode_text(model: LoadedModel, text: str) -> EncodedPrompt:
    """Return the ids of a text that the model goes on from, with the tokens that its tokenizer puts before it."""
    return EncodedPrompt(_checked(model, model.tokenizer(text)["input_ids"]))


def encode_chat(
    model: LoadedModel, messages: Sequence[Message], tools: Sequence[Message] = (), images: Sequence[StoredImage] = ()
) -> EncodedPrompt:
    """Return a chat that the model answers. Raises ConfigError if the template refuses it, or the processor an image.

    images: of the messages, which have IMAGE in their place.
    """
    conversation = Conversation(tuple(map(dict, messages)), tuple(map(dict, tools)))
    try:
        if images:
            return _with_images(model, conversation, images)
        text = render_prompt(model.template, conversation)
    except RecordError as error:
        raise ConfigError(str(error)) from None
    return EncodedPrompt(_ids_of(model, text))


def _with_images(model: LoadedModel, conversation: Conversation, images: Sequence[StoredImage]) -> EncodedPrompt:
    """Return a chat with images, whose ids are those of its training. Raises ConfigError, RecordError."""
    if model.processor is None:
        raise ConfigError(
            f"this {model.model.config.model_type} model is asked with texts only; images are for models of type "
            f"{', '.join(VISION_FAMILIES)}, with {' or '.join(PROCESSOR_FILES)} in their folder"
        )
    text = render_prompt(replace(model.template, in_parts=True), conversation)
    check_places(text, len(images), model.processor)
    replaced = ReplacedText.of(text, images, model.processor, load_tokenizer(str(model.processor.folder)))
    ids = _ids_of(model, replaced.text)
    replaced.column(np.array(ids))  # checks them
    return EncodedPrompt(ids, tuple(images))


def _ids_of(model: LoadedModel, text: str) -> list[int]:
    """Return the ids of a rendered chat. Raises ConfigError as encode_text."""
    return _checked(model, model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _checked(model: LoadedModel, ids: list[int]) -> list[int]:
    positions = positions_of(model.model.config)
    if not ids:
        raise ConfigError("the prompt is empty: give at least a letter")
    if positions is not None and len(ids) >= positions:
        raise ConfigError(f"the prompt has {len(ids)} tokens, and the model {positions} positions: shorten it")
    return ids


def generate(
    model: LoadedModel, prompts: Sequence[EncodedPrompt], sampling: Sampling, streamer: TextStreamer | None = None
) -> list[Answer]:
    """Return the answers to prompts, which are computed together.

    streamer: is given the tokens as they come, of a single prompt.
    """
    longest, pad = max(len(prompt.ids) for prompt in prompts), model.marks.pad or 0
    ids = torch.tensor([[pad] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
    positions = positions_of(model.model.config)
    room = sampling.max_new_tokens if positions is None else min(sampling.max_new_tokens, positions - longest)
    stops: dict[str, Any] = {"eos_token_id": ends} if (ends := _ends(model)) else {}
    if model.marks.text:
        stops |= {"stop_strings": [model.marks.text], "tokenizer": model.tokenizer}
    made = model.model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=room, pad_token_id=pad,
        streamer=streamer, **_pictured(model, ids, prompts), **stops, **sampling.arguments,
    )  # fmt: skip
    return [_answer(model, row) for row in made[:, longest:].tolist()]


def _pictured(model: LoadedModel, ids: torch.Tensor, prompts: Sequence[EncodedPrompt]) -> dict[str, torch.Tensor]:
    """Return what the model takes of the images of prompts, as its processor makes it of all of them together."""
    contents = [image.content for prompt in prompts for image in prompt.images]
    if model.processor is None or not contents:
        return {}
    inputs, _ = model.processor.inputs_of(*contents)
    inputs |= token_types(model.model.base_model, ids)
    kinds = {name: model.model.dtype if value.is_floating_point() else None for name, value in inputs.items()}
    return {name: value.to(model.device, kinds[name]) for name, value in inputs.items()}


def _ends(model: LoadedModel) -> list[int]:
    return list(dict.fromkeys([*model.marks.ends, *listed_ids(model.model.generation_config.eos_token_id)]))


def _answer(model: LoadedModel, ids: list[int]) -> Answer:
    end = next((place for place, token in enumerate(ids) if token in _ends(model)), None)
    text: str = model.tokenizer.decode(ids[:end], skip_special_tokens=True)
    before, found, _ = text.partition(model.marks.text) if model.marks.text else (text, "", "")
    return Answer(before, end is not None or bool(found))


def text_streamer(model: LoadedModel, write: Callable[[str], None]) -> TextStreamer:
    """Return a streamer that writes each word of an answer when it is complete, without the mark at the end."""
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = _EndCut(model.marks.text, write).add
    return streamer


class _EndCut:
    """Passes on a text that comes in pieces, up to `end`. What may be the beginning of that waits for the rest."""

    def __init__(self, end: str, write: Callable[[str], None]) -> None:
        self._end, self._write = end, write
        self._waiting = ""

    def add(self, text: str, stream_end: bool = False) -> None:
        self._waiting += text
        before, found, _ = self._waiting.partition(self._end) if self._end else (self._waiting, "", "")
        held = 0 if found or stream_end else max(0, len(self._end) - 1)
        done = before[: max(0, len(before) - held)]
        self._waiting = self._waiting[len(done) :]
        self._write(done)
