"""Makes conversations as templates take them, and finds the parts of an answer in what a template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatrain_ray.io.images.image_parts import PART_TYPES, UNREAD
from megatrain_ray.io.records.read_records import RecordError

Message = Mapping[str, Any]

PROBE = "m3gaprobe"  # text that no template contains
THOUGHT = "its thought (under reasoning_content or thinking, or in the content)"  # of `missing_parts`
THOUGHT_KEYS = ("reasoning_content", "thinking")
OPENED_CHARS = 100  # at the end of a prompt, in which marks of a thought are looked for
_INLINE = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>", re.DOTALL)  # at the beginning of a content
# A mark around a thought in a rendered text: <think>, [/THINK], <|START_THINKING|>, or Gemma 4's channel.
_MARK = r"(?:<[^<>\s]*th(?:ink|ought)[^<>\s]*>|\[/?THINK(?:ING)?\]|<\|channel>thought|<channel\|>)"
_OPENING = re.compile(rf"{_MARK}\s*\Z", re.IGNORECASE)
_CLOSING = re.compile(rf"\s*{_MARK}\s*", re.IGNORECASE)
_EMPTY = re.compile(rf"\s*{_MARK}\s*{_MARK}\s*", re.IGNORECASE)
_OPENED = re.compile(rf"(?:{_MARK}\s*)+\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Conversation:
    """Holds messages as a chat template takes them, and the tools that the assistant may call.

    loss_weights: how much assistant turns count in the loss, by index, if not 1.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    loss_weights: Mapping[int, float] = field(default_factory=dict)

    @property
    def assistant_turns(self) -> list[int]:
        """Return the indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def answers(self) -> list[tuple[int, float]]:
        """Return index and loss weight of each assistant turn that is learned."""
        weights = ((i, self.loss_weights.get(i, 1.0)) for i in self.assistant_turns)
        return [(i, weight) for i, weight in weights if weight]

    def with_last_only(self, num_given: int = -1) -> Conversation:
        """Return the same conversation, of which the first `num_given` assistant turns are not learned.

        -1: only the last one is.
        """
        given = self.assistant_turns[:num_given]
        return replace(self, loss_weights={**self.loss_weights, **dict.fromkeys(given, 0.0)})


def text_of(content: Any, where: str) -> str:
    """Return a text as it is, a list of text parts joined, and "" for null. Raises RecordError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_is_text, content)):
        return "".join(part["text"] for part in content)
    if isinstance(content, list) and any(isinstance(p, dict) and p.get("type") in PART_TYPES for p in content):
        raise RecordError(f"{where}: holds an image, {UNREAD}")
    raise RecordError(f"{where}: expected a text or a list of text parts, got {content!r:.60}")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def new_message(role: str, text: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked message. Raises RecordError for a turn without content, where it needs some.

    role: a template's role, or `function_call`, whose text is the JSON of one tool call or a list of them.
    extras: further keys of the message, of MESSAGE_EXTRAS.
    """
    if role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _calls(_parsed(text, "function call"))}
    message = {"role": role, "content": text, **extras}
    if calls := extras.get("tool_calls"):
        if role != "assistant":
            raise RecordError("tool_calls: only the assistant calls tools")
        message["tool_calls"] = _calls(calls)
    elif role != "tool" and not text.strip():
        raise RecordError(f"empty turn of {role}")
    return message


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools of a record, each in the envelope {"type": "function", "function": …}. Raises RecordError.

    value: a list of JSON schemas, or its JSON text, or a list of texts; empty or null for none.
    """
    tools = _parsed(value, "tools") if isinstance(value, str) and value.strip() else value or []
    if isinstance(tools, list):
        tools = [_parsed(tool, "tools") if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"tools: expected a list of JSON schemas, got {value!r:.60}")
    found = tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
    if wrong := [tool for tool in found if not isinstance(tool["function"], dict)]:
        raise RecordError(f"tools: expected a JSON schema under 'function', got {wrong[0]['function']!r:.60}")
    return found


def _calls(value: Any) -> list[dict[str, Any]]:
    calls = value if isinstance(value, list) else [value]
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call in its envelope, with the arguments as a mapping.

    OpenAI writes arguments as JSON text, which a template would render as a text in quotes.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
        raise RecordError(f"tool call: expected a name and arguments, got {call!r:.60}")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise RecordError(f"arguments of a tool call: expected a mapping, or its JSON text, got {arguments!r:.60}")
    envelope = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **envelope, "function": {**function, "arguments": arguments}}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what}: not valid JSON: {error}") from None


class AnswerParts(NamedTuple):
    """Holds what the assistant wrote in one turn.

    calls: names of the functions that it calls.
    """

    text: str
    thought: str
    calls: tuple[str, ...]


def parts_of(answer: Message) -> AnswerParts:
    """Return the parts of a message. A thought stands under a key of its own, or before </think> in the content."""
    content = answer.get("content") or ""
    calls = tuple(call["function"]["name"] for call in answer.get("tool_calls") or ())
    thoughts = [answer[key] for key in THOUGHT_KEYS if answer.get(key)]
    if not thoughts and (inline := _INLINE.match(content)):
        return AnswerParts(content[inline.end() :], inline["thought"], calls)
    return AnswerParts(content, "\n".join(dict.fromkeys(map(str, thoughts))), calls)


def probed_thought(answer: Message) -> Message:
    """Return the message with `PROBE` in place of its thought."""
    keys = [key for key in THOUGHT_KEYS if answer.get(key)]
    if keys:
        return {**answer, **dict.fromkeys(keys, PROBE)}
    content = answer.get("content") or ""
    inline = _INLINE.match(content)
    if inline is None:
        return answer
    start, end = inline.span("thought")
    return {**answer, "content": content[:start] + PROBE + content[end:]}


def thought_range(text: str, probed: str) -> tuple[int, int] | None:
    """Return the range of an answer's thought and its marks in a rendered text; None if the text does not have it.

    probed: the same text with `PROBE` in place of the thought.
    """
    before, found, after = probed.partition(PROBE)
    if not found or not (text.startswith(before) and text.endswith(after)):
        return None
    start, end = len(before), len(text) - len(after)
    opening, closing = _OPENING.search(before), _CLOSING.match(text, end)
    return opening.start() if opening else start, closing.end() if closing else end


def without_opened_thought(prompt: str) -> str:
    """Return a prompt without the thought that it opens, or has empty: some templates write other answers without it.

    MiniMax-M2's prompt ends with <think>, DeepSeek-V3.1's with </think>, Qwen3.5's with both.
    """
    start = max(len(prompt) - OPENED_CHARS, 0)
    opened = _OPENED.search(prompt, start)
    return prompt[: opened.start()] if opened else prompt


def empty_thought(text: str, start: int) -> tuple[int, int]:
    """Return the range of the thought without words that some templates write at the `start` of an answer."""
    found = _EMPTY.match(text, start)
    return start, found.end() if found else start


def is_written(text: str, squeezed: str) -> bool:
    """Return whether a text, or its form within JSON, is in a `squeezed` one."""
    if squeeze(text) in squeezed:
        return True
    return any(squeeze(json.dumps(text, ensure_ascii=ascii)[1:-1]) in squeezed for ascii in (False, True))


@dataclass(frozen=True)
class Written:
    """Holds what a template writes, also without blanks: these do not count, since templates trim texts."""

    text: str

    @cached_property
    def squeezed(self) -> str:
        return squeeze(self.text)


def missing_parts(answer: Message, learned: Written, text: Written) -> Iterator[str]:
    """Yield in words what an answer holds and a template leaves out.

    learned: the supervised part of the rendered text.
    text: all of the text that may hold the thought.
    """
    parts = parts_of(answer)
    if squeeze(parts.text) not in learned.squeezed:
        yield "its text"
    if answer.get("content") is None and learned.text.count("None") > json.dumps(dict(answer), default=str).count(
        "None"
    ):
        yield "that it has no text, which becomes None,"
    for name in parts.calls:
        if squeeze(name) not in learned.squeezed:
            yield f"its call of {name}"
    if squeeze(parts.thought) not in text.squeezed:
        yield THOUGHT


def squeeze(text: str) -> str:
    """Return the text without blanks."""
    return "".join(text.split())
