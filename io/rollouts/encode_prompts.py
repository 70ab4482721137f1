"""Encodes prompts for a sampler."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.conversation_formats import LAYOUTS, PROMPT_COMPLETION, ChatFormat, read_conversation
from megatrain_ray.io.chat.encode_chats import with_ends_of
from megatrain_ray.io.chat.mark_turns import render_prompt
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.choose_records import ALL_RECORDS, RecordChoice, chosen_records
from megatrain_ray.io.records.read_records import (
    BadRecords,
    RecordError,
    RecordTally,
    as_mapping,
    as_written,
    check_unicode,
)
from megatrain_ray.io.tokens.token_files import TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer, load_tokenizer

PROMPT = "prompt"  # key of a record, as TRL has it


@dataclass(frozen=True)
class PromptRecipe:
    """Makes one document of each record: its prompt in the chat template."""

    files: tuple[Path, ...]
    tokenizer: str
    template: ChatTemplate
    chat_format: ChatFormat
    choice: RecordChoice = ALL_RECORDS
    has_weights: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ()
    bad_records: ClassVar[BadRecords] = "error"  # documents must be found by the number of their record

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "prompts",
            **self.template.settings(),
            "chat_format": self.chat_format,
            **load_tokenizer(self.tokenizer).extension,
            **self.choice.settings(),
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        """Yield the prompts. Raises ConfigError for a bad record."""
        assert tokenizer is not None
        tokenizer = with_ends_of(self.template, tokenizer)
        for location, record in chosen_records(self.files, self.choice):
            tally.num_records += 1
            try:
                text = render_prompt(self.template, asked_of(as_written(location, record), self.chat_format))
                ids = tokenizer.encode(check_unicode(text, "the prompt")).astype(np.uint32)
            except RecordError as error:
                raise ConfigError(f"data.path: {location}: {error}") from None
            tally.longest = max(tally.longest, ids.size)
            yield TokenBlock(ids, True, location)


def asked_of(record: Any, chat_format: ChatFormat) -> Conversation:
    """Return what the model is asked: the prompt of a record, or the turns before its last answer.

    Raises RecordError.
    """
    fields = as_mapping(record)
    if fields.get(PROMPT) is not None:
        return _without_answer(PROMPT_COMPLETION.read_prompt(fields))
    return _without_answer(read_conversation(record, LAYOUTS[chat_format]))


def _without_answer(conversation: Conversation) -> Conversation:
    messages = conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RecordError("expected a prompt, or a turn before the answer")
    return Conversation(messages, conversation.tools)
