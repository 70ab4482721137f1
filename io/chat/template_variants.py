"""Varies how a conversation is given to a chat template: some templates take what others refuse or leave out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from megatrain_ray.io.chat.chat_template import TemplateRefusalError
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError

Messages = tuple[dict[str, Any], ...]
Result = TypeVar("Result")


def in_any_variant(conversation: Conversation, work: Callable[[Conversation], Result]) -> Result:
    """Return the result of `work` for the first variant of a conversation for which it raises no RecordError.

    If it raises for all, this raises the error that names what the template leaves out, or else the template's refusal.
    """
    problems: list[RecordError] = []
    variants = _variants(conversation)
    for variant in variants:
        try:
            return work(variant)
        except RecordError as error:
            problems.append(error)
    has_none = any(message.get("content") is None for message in conversation.messages)
    first = problems[1 if has_none else 0]  # that of an empty text: templates fail on None in many ways
    lacking = (problem for problem in problems if not isinstance(problem, TemplateRefusalError))
    raise next(lacking, first) if isinstance(first, TemplateRefusalError) else first


def _variants(conversation: Conversation) -> list[Conversation]:
    """Return the variants of a conversation: as given first, then with each change that applies, alone and together."""
    variants = [conversation.messages]
    for change in (_with_other_emptiness, _with_text_arguments, _with_named_ids, _with_system_for_developer):
        variants += [changed for variant in variants if (changed := change(variant)) != variant]
    return [replace(conversation, messages=variant) for variant in variants]


def _with_other_emptiness(messages: Messages) -> Messages:
    """Swap None and the empty text where an answer calls tools and says nothing: templates test for either."""
    return tuple(
        {**message, "content": "" if message.get("content") is None else None}
        if message.get("tool_calls") and not message.get("content")
        else message
        for message in messages
    )


def _with_text_arguments(messages: Messages) -> Messages:
    """Write the arguments of calls as JSON text, as OpenAI does."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return _with_calls(messages, as_text)


def _with_named_ids(messages: Messages) -> Messages:
    """Give calls the ids of Kimi K2, `functions.get_weather:0`: its templates write the id in place of the name."""
    names: dict[Any, str] = {}
    unanswered: list[str] = []

    def named(call: dict[str, Any]) -> dict[str, Any]:
        unanswered.append(f"functions.{call['function']['name']}:{len(names)}")
        names[call.get("id") or len(names)] = unanswered[-1]
        return {**call, "id": unanswered[-1]}

    def renamed(message: dict[str, Any]) -> dict[str, Any]:
        (message,) = _with_calls((message,), named)
        if message["role"] != "tool" or not unanswered:
            return message
        return {**message, "tool_call_id": names.get(message.get("tool_call_id")) or unanswered.pop(0)}

    return tuple(map(renamed, messages))


def _with_calls(messages: Messages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Messages:
    return tuple(
        {**message, "tool_calls": list(map(change, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    )


def _with_system_for_developer(messages: Messages) -> Messages:
    """Call OpenAI's developer by the older word, which all other templates have."""
    return tuple({**message, "role": "system"} if message["role"] == "developer" else message for message in messages)
