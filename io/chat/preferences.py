"""Reads pairs of a chosen and a rejected answer, and answers that are labelled good or bad.

KTO (K. Ethayarajh et al., 2024, arXiv:2402.01306) learns from the latter. It estimates a KL divergence by prompts that
are joined with an answer to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatrain_ray.io.chat.conversation_formats import (
    ALPACA,
    CHOSEN,
    LABEL_KEYS,
    MESSAGES,
    PROMPT_COMPLETION,
    REJECTED,
    TURN_KEYS,
    AlpacaLayout,
    AutoLayout,
    ChatLayout,
    PromptLayout,
    TurnsLayout,
    learnable_fields,
    number_under,
    read_conversation,
    turns_layout,
)
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError, as_mapping, keys_of, missing_key
from megatrain_ray.io.tokens.token_files import LossWeights, TokenArray

Sequence = tuple[TokenArray, LossWeights]
Item = TypeVar("Item")

MARGIN = "margin"  # key of the reward by which the chosen answer shall be ahead


@dataclass(frozen=True)
class PairLayout:
    """Describes records with two answers to one prompt, of which the first is preferred.

    prompt: layout of the prompt; AutoLayout: recognised by its keys, or it is what both answers begin with.
    """

    prompt: ChatLayout
    chosen: str = CHOSEN
    rejected: str = REJECTED

    def read(self, record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        """Return the prompt with each answer, of which only the answer is learned. Raises RecordError."""
        if missing := [key for key in (self.chosen, self.rejected) if record.get(key) is None]:
            raise missing_key(record, missing[0])
        layout = self.prompt
        if isinstance(layout, AutoLayout):
            layout, record = self._recognised(record)
        return self._answered(record, layout, self.chosen), self._answered(record, layout, self.rejected)

    def _recognised(self, record: Mapping[str, Any]) -> tuple[ChatLayout, Mapping[str, Any]]:
        """Return the layout of the prompt, and the record with the prompt taken out of the answers if it was there."""
        if all(_is_whole(record, record[key]) for key in (self.chosen, self.rejected)):
            return PROMPT_COMPLETION, self._divided(record)
        for name in TURN_KEYS:
            if record.get(name) is not None:
                return turns_layout(record, name), record
        if "instruction" in record:
            return ALPACA, record
        if (key := prompt_key(record, record[self.chosen])) is not None:
            return replace(PROMPT_COMPLETION, prompt=key), record
        return PROMPT_COMPLETION, self._divided(record)

    def _divided(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        prompt, chosen, rejected = _common_prompt(record[self.chosen], record[self.rejected])
        return {**record, "prompt": prompt, self.chosen: chosen, self.rejected: rejected}

    def _answered(self, record: Mapping[str, Any], layout: ChatLayout, key: str) -> Conversation:
        if isinstance(layout, AlpacaLayout):
            conversation = replace(layout, output=key).read(record).with_last_only()
        elif isinstance(layout, PromptLayout):
            conversation = replace(layout, completion=key).read(record)
        elif isinstance(layout, TurnsLayout) and isinstance(turns := record.get(layout.turns), list):
            answer = record[key] if isinstance(record[key], list) else [record[key]]
            asked = len([turn for turn in layout.read_turns(turns) if turn.message["role"] == "assistant"])
            conversation = layout.read({**record, layout.turns: [*turns, *answer]}).with_last_only(asked)
        else:
            raise RecordError(f"expected a prompt beside {key}; its keys are {keys_of(record)}")
        if not conversation.answers:
            raise RecordError(f"{key}: expected an answer of the assistant, got {record[key]!r:.60}")
        if any(weight != 1 for _, weight in conversation.answers):
            raise RecordError(f"{key}: weights other than 0 and 1 have no meaning in a preference; remove weight")
        return conversation


def prompt_key(record: Mapping[str, Any], answer: Any) -> str | None:
    """Return the key of the prompt; None if the answer begins with it. Only beside a text it may be another key."""
    keys = ("prompt", "question", "input") if isinstance(answer, str) else ("prompt",)
    return next((key for key in keys if record.get(key)), None)


def _is_whole(record: Mapping[str, Any], answer: Any) -> bool:
    """Return whether an answer is a conversation that begins with what is also given as the prompt.

    So it is in HuggingFaceH4/ultrafeedback_binarized, beside a text and the messages of the chosen one.
    """
    if not isinstance(answer, list) or not answer or not isinstance(answer[0], dict):
        return False
    prompt = record.get("prompt")
    asks = answer[0].get("role") in ("system", "developer", "user")
    lists = (prompt, record.get("messages"))
    return (isinstance(prompt, str) and asks) or any(isinstance(x, list) and x[:1] == answer[:1] for x in lists)


def _common_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return what both answers begin with, and the rest of each, as TRL's extract_prompt does. Raises RecordError."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise RecordError(f"{CHOSEN} and {REJECTED}: expected two texts or two lists of turns, got {chosen!r:.60}")
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if length is None and len(chosen) == len(rejected):
        raise RecordError(f"{CHOSEN} and {REJECTED}: expected two answers that differ, got {chosen!r:.60}")
    if length is None:
        raise RecordError(
            f"no prompt: one of {CHOSEN} and {REJECTED} begins with the other, and there is no key 'prompt'"
        )
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1  # the blank belongs to the answers
    if not length:
        raise RecordError(f"no prompt: {CHOSEN} and {REJECTED} begin differently, and there is no key 'prompt'")
    return chosen[:length], chosen[length:], rejected[length:]


def read_pair(record: Any, layout: PairLayout) -> tuple[Conversation, Conversation]:
    """Return a record's prompt with the chosen answer, and with the rejected one. Raises RecordError."""
    return layout.read(learnable_fields(record))


def read_margin(record: Any) -> float:
    """Return the margin of a preference, which a reward model keeps; 0 if it has none. Raises RecordError."""
    return number_under(as_mapping(record), MARGIN, 0.0)


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
            got = f"{is_good!r:.60}" if name in fields else f"no such key (keys: {keys_of(fields)})"
            raise RecordError(f"{name}: expected true or false: whether the answer is good, got {got}")
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

    def unmatched(self) -> tuple[Any, Sequence]:
        """Return the item, and its own prompt and answer with negative loss weights, since there is no other answer."""
        ids, weights = self.joined(self, self.prompt.size + self.answer[0].size)[1]
        return self.item, (ids, -weights)

    def joined(self, other: _Answered, max_tokens: int) -> tuple[Any, Sequence]:
        """Return the item, and its prompt with the answer of another one."""
        ids = np.concatenate([self.prompt, other.answer[0]])
        weights = np.concatenate([np.zeros_like(other.answer[1], shape=self.prompt.size), other.answer[1]])
        return self.item, (ids[:max_tokens], weights[:max_tokens])


def with_mismatched(
    items: Iterable[Item], sequence_of: Callable[[Item], Sequence | None], max_tokens: int
) -> Iterator[tuple[Item, Sequence | None]]:
    """Yield each item, in order, with its mismatched sequence: its prompt with an answer to another prompt.

    That is the answer of the nearest item before it whose prompt differs, or else of the first after it. If all prompts
    are the same, it is its own answer with negative loss weights. Items without a sequence come as they are.

    sequence_of: returns the ids and loss weights of an item; None if nothing is used of it.
    max_tokens: longest sequence.
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
    yield from (before.unmatched() for before in waiting)
