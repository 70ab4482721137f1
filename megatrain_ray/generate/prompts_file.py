"""Answers the prompts of a file in batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_ray.errors import ConfigError
from megatrain_ray.generate.answer import Answer, EncodedPrompt, Sampling, encode_chat, encode_text, generate
from megatrain_ray.generate.load_model import LoadedModel
from megatrain_ray.io.chat.conversation_formats import LAYOUTS, read_conversation
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.images.image_parts import RecordImages, read_image
from megatrain_ray.io.records.read_records import RecordError, as_mapping, as_written, missing_key, read_records
from megatrain_ray.io.tokens.image_files import StoredImage


def answer_file(
    model: LoadedModel, file: Path, sampling: Sampling, *, chat: bool, batch_size: int
) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, each with `answer` and `ended` (whether it ended by itself), in their order.

    chat: records are chats in any format that training reads; the answer is to the turns before the last answer. A
        record may also have a `prompt`, a user's turn or messages. Images are those that training reads. Otherwise
        records have a `prompt`, which goes on.

    Prompts of about one length are computed together. Raises ConfigError, naming the record, for a bad one.
    """
    records, prompts = [], []
    for location, record in read_records(file):
        try:
            prompts.append(_released(_encode(model, as_written(location, record), file.parent, chat=chat)))
        except (RecordError, ConfigError) as error:
            raise ConfigError(f"{location}: {error}") from None
        records.append(record)
    answers: dict[int, Answer] = {}
    by_length = sorted(range(len(prompts)), key=lambda k: len(prompts[k].ids))
    for start in range(0, len(prompts), batch_size):
        chosen = by_length[start : start + batch_size]
        answers |= zip(chosen, generate(model, [_loaded(prompts[k]) for k in chosen], sampling), strict=True)
    for k, record in enumerate(records):
        yield {**record, "answer": answers[k].text, "ended": answers[k].ended}


def _released(prompt: EncodedPrompt) -> EncodedPrompt:
    """Return a prompt without the bytes of its image files: those of a large file of prompts would fill the memory."""
    return prompt._replace(
        images=tuple(image._replace(content=b"") if image.identity else image for image in prompt.images)
    )


def _loaded(prompt: EncodedPrompt) -> EncodedPrompt:
    """Return a prompt with the bytes of its image files. Raises ConfigError if a file is not as it was."""
    return prompt._replace(images=tuple(_read_again(image) if image.identity else image for image in prompt.images))


def _read_again(image: StoredImage) -> StoredImage:
    assert image.identity is not None
    path = image.identity[0]
    try:
        found = read_image(path, Path())
    except RecordError as error:
        raise ConfigError(str(error)) from None
    if found.identity != image.identity:
        raise ConfigError(f"{path} was changed after its prompt was read; start again")
    return found


def _encode(model: LoadedModel, record: object, folder: Path, *, chat: bool) -> EncodedPrompt:
    """Return the prompt of a record. `folder`: where relative paths of images start."""
    fields = as_mapping(record)
    if not chat:
        if isinstance(prompt := fields.get("prompt"), str):
            return encode_text(model, prompt)
        raise missing_key(fields, "prompt", " (chats need --chat)")
    pictured = RecordImages(fields, folder)
    turns = pictured.fields
    if isinstance(prompt := turns.get("prompt"), str):
        conversation = Conversation(({"role": "user", "content": prompt},))
    else:
        turns = {"messages": prompt, "tools": turns.get("tools")} if isinstance(prompt, list) else turns
        conversation = read_conversation(turns, LAYOUTS["auto"])
    messages, images = pictured.take(conversation.messages, conversation.tools)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return encode_chat(model, messages, conversation.tools, images)
