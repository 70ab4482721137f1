"""Reads answers that are labelled good or bad, and joins each prompt with an answer to another one.

KTO (K. Ethayarajh et al., 2024, arXiv:2402.01306) learns from the first, and estimates a KL divergence by the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.conversation_formats import (
    ALPACA,
    LABEL_KEYS,
    MESSAGES,
    PROMPT_COMPLETION,
    AutoLayout,
    ChatLayout,
    Conversation,
    PromptLayout,
    prompt_key,
    read_conversation,
)
from megatrain_ray.io.records.read_records import RecordError, as_mapping
from megatrain_ray.io.tokens.token_files import LossWeights, TokenArray

Sequence = tuple[TokenArray, LossWeights]
Item = TypeVar("Item")


@dataclass(frozen=True)
class UnpairedLayout:
    """Describes records with one answer, and a label that says whether it is good.

    label: key of the label; None: one of LABEL_KEYS.
    """

    answer: ChatLayout
    label: str | None = None

    def read(self, record: Any) -> tuple[Conversation, bool]:
        """Return the conversation, of which only the answer is learned, and whether that is good. Raises RecordError.

        The answer is the completion, or the last turn of the assistant.
        """
        fields = as_mapping(record)
        names = LABEL_KEYS if self.label is None else (self.label,)
        name = next((name for name in names if fields.get(name) is not None), names[0])
        if not isinstance(is_good := fields.get(name), bool):
            raise RecordError(f"{name}: expected true or false: whether the answer is good, got {is_good!r:.60}")
        fields = {key: value for key, value in fields.items() if key != name}
        layout = self._recognised(fields)
        conversation = read_conversation(fields, layout)
        if not isinstance(layout, PromptLayout):
            conversation = conversation.with_last_only()
        if any(weight != 1 for _, weight in conversation.answers):
            raise RecordError("weight: weights other than 0 and 1 have no meaning for labelled answers; remove them")
        return conversation, is_good

    def _recognised(self, record: Mapping[str, Any]) -> ChatLayout:
        """Return the layout of a record, whose completion may begin with the prompt, or stand with an instruction."""
        completion = record.get("completion")
        if not isinstance(self.answer, AutoLayout) or completion is None:
            return self.answer
        if "instruction" in record and record.get("prompt") is None:
            return replace(ALPACA, output="completion")
        if (key := prompt_key(record, completion)) is not None:
            return replace(PROMPT_COMPLETION, prompt=key)
        return replace(MESSAGES, turns="completion")


class _Answered(NamedTuple):
    """Holds an item of the stream and the ids of its prompt and answer."""

    item: Any
    prompt: TokenArray
    answer: Sequence

    @staticmethod
    def of(item: Any, own: Sequence) -> _Answered:
        ids, weights = own
        start = int(np.argmax(weights != 0))
        return _Answered(item, ids[:start], (ids[start:], np.abs(weights[start:])))

    def joined(self, other: _Answered, max_tokens: int) -> tuple[Any, Sequence]:
        """Return the item, and its prompt with the answer of another one."""
        ids = np.concatenate([self.prompt, other.answer[0]])
        weights = np.concatenate([np.zeros_like(other.answer[1], shape=self.prompt.size), other.answer[1]])
        return self.item, (ids[:max_tokens], weights[:max_tokens])


def with_mismatched(
    items: Iterable[Item], sequence_of: Callable[[Item], Sequence | None], max_tokens: int
) -> Iterator[tuple[Item, Sequence | None]]:
    """Yield each item, in order, with its mismatched sequence: its prompt with an answer to another prompt.

    That is the answer of the nearest item before it whose prompt differs, or else of the first after it. Items without
    a sequence come as they are.

    sequence_of: returns the ids and loss weights of an item; None if nothing is used of it.
    max_tokens: longest sequence.

    Raises ConfigError if all prompts are the same.
    """
    waiting: list[_Answered] = []  # those at the beginning that have the same prompt
    last = other = None  # the newest, and the newest whose prompt differs from its
    for item in items:
        sequence = sequence_of(item)
        if sequence is None:
            yield item, None
            continue
        found = _Answered.of(item, sequence)
        if last is not None and not np.array_equal(found.prompt, last.prompt):
            yield from (before.joined(found, max_tokens) for before in waiting)
            waiting, other = [], last
        last = found
        if other is None:
            waiting.append(found)
        else:
            yield found.joined(other, max_tokens)
    if waiting:
        raise ConfigError(
            f"data.path: {len(waiting)} labelled answers to one prompt; kto compares with answers to another one: give "
            "records of two prompts or more"
        )
