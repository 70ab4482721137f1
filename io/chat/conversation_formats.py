"""Reads records of chats as conversations: alpaca, sharegpt and `messages`, recognised by their keys or as stated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from megatrain_ray.io.records.read_records import RecordError, as_mapping, missing_key

ChatFormat = Literal["auto", "alpaca", "sharegpt", "messages"]

# Keys that change what is learned in ways that a Conversation cannot express.
REFUSED_KEYS = ("chosen", "rejected", "kto_tag", "image", "images", "video", "videos", "audio", "audios")

# Keys that a turn may have in addition to role and content; templates read these names.
MESSAGE_EXTRAS = frozenset({"tool_calls", "tool_call_id", "name", "reasoning_content", "thinking"})
MESSAGE_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Holds messages as a chat template takes them, and the tools that the assistant may call."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class AlpacaLayout:
    """Describes records with one question and one answer, perhaps with earlier ones, by their keys; None: no key."""

    instruction: str | None = "instruction"
    input: str | None = "input"
    output: str | None = "output"
    system: str | None = "system"
    history: str | None = "history"
    tools: str | None = "tools"

    def read(self, record: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a record. Raises RecordError naming the key or turn that is wrong."""
        _check_keys(frozenset(record), (self.input, self.system, self.history, self.tools))
        if missing := [key for key in (self.instruction, self.output) if key and key not in record]:
            raise missing_key(record, missing[0])
        parts = [text_of(_get(record, key), str(key)) for key in (self.instruction, self.input)]
        answer = text_of(_get(record, self.output), str(self.output))
        turns = [*self._history(record), ("user", "\n".join(part for part in parts if part)), ("assistant", answer)]
        messages = [new_message(role, text, {}) for role, text in turns]
        return _conversation(record, messages, self.system, self.tools)

    def _history(self, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        pairs = _get(record, self.history) or []
        if not isinstance(pairs, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
            raise RecordError(f"{self.history}: expected a list of [question, answer], got {pairs!r:.60}")
        for number, (question, answer) in enumerate(pairs, 1):
            where = f"{self.history}, pair {number}"
            yield "user", text_of(question, where)
            yield "assistant", text_of(answer, where)


@dataclass(frozen=True)
class TurnsLayout:
    """Describes records with a list of turns, each with a role and a content.

    roles: maps the roles of the records to those of a template.
    extras: further keys that a turn may have.
    """

    turns: str
    role: str
    content: str
    roles: Mapping[str, str]
    extras: frozenset[str] = frozenset()
    system: str | None = "system"
    tools: str | None = "tools"

    def read(self, record: Mapping[str, Any]) -> Conversation:
        _check_keys(frozenset(record), (self.system, self.tools))
        turns = record.get(self.turns)
        if not isinstance(turns, list) or not turns:
            found = f"{turns!r:.60}" if self.turns in record else f"none (keys: {', '.join(map(str, record))})"
            raise RecordError(f"{self.turns}: expected a list of turns, got {found}")
        messages = [self._message(turn, f"turn {number}") for number, turn in enumerate(turns, 1)]
        return _conversation(record, messages, self.system, self.tools)

    def _message(self, turn: Any, where: str) -> dict[str, Any]:
        if not isinstance(turn, dict) or not isinstance(role := turn.get(self.role), str):
            raise RecordError(f"{where}: expected a mapping with {self.role} and {self.content}, got {turn!r:.60}")
        if role not in self.roles:
            raise RecordError(f"{where}: unknown role {role!r}; expected one of {', '.join(self.roles)}")
        extras = {key: turn[key] for key in turn.keys() - {self.role, self.content} if turn[key] is not None}
        if unknown := sorted(extras.keys() - self.extras):
            known = ", ".join([self.role, self.content, *sorted(self.extras)])
            raise RecordError(f"{where}: unknown key {unknown[0]!r}; expected {known}")
        try:
            return new_message(self.roles[role], text_of(turn.get(self.content), self.content), extras)
        except RecordError as error:
            raise RecordError(f"{where} ({role}): {error}") from None


ALPACA = AlpacaLayout()
SHAREGPT = TurnsLayout("conversations", "from", "value", SHAREGPT_ROLES)
MESSAGES = TurnsLayout("messages", "role", "content", MESSAGE_ROLES, extras=MESSAGE_EXTRAS)


@dataclass(frozen=True)
class AutoLayout:
    """Recognises the format of each record by its keys. Turns may stand under `messages` or `conversations`."""

    def read(self, record: Mapping[str, Any]) -> Conversation:
        found = [_recognised(record, name) for name in ("messages", "conversations") if record.get(name) is not None]
        if "instruction" in record and "output" in record:
            found.append(ALPACA)
        if len(found) == 1:
            return found[0].read(record)
        fits = "several formats at once" if found else "no known format"
        raise RecordError(
            f"its keys ({', '.join(map(str, record)) or 'none'}) fit {fits}; expected messages, conversations, or "
            "instruction and output. State data.chat_format, or rename the keys"
        )


ChatLayout = AlpacaLayout | TurnsLayout | AutoLayout
LAYOUTS: Mapping[ChatFormat, ChatLayout] = {
    "auto": AutoLayout(), "alpaca": ALPACA, "sharegpt": SHAREGPT, "messages": MESSAGES,
}  # fmt: skip


def read_conversation(record: Any, layout: ChatLayout) -> Conversation:
    """Return the conversation of a record of `read_records`. Raises RecordError."""
    fields = as_mapping(record)
    if refused := [key for key in REFUSED_KEYS if fields.get(key) not in (None, [], "")]:
        raise RecordError(f"{refused[0]}: preferences and media cannot be learned from; remove the key")
    return layout.read(fields)


def _recognised(record: Mapping[str, Any], name: str) -> ChatLayout:
    turns = record[name]
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "from" in first:
        return TurnsLayout(name, "from", "value", SHAREGPT_ROLES)
    return TurnsLayout(name, "role", "content", MESSAGE_ROLES, extras=MESSAGE_EXTRAS)


def _conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], system: str | None, tools: str | None
) -> Conversation:
    if system and (text := text_of(record.get(system), system)):
        if messages[0]["role"] == "system":
            raise RecordError(f"two system texts: one under {system!r}, one in turn 1; keep one")
        messages = [new_message("system", text, {}), *messages]
    return Conversation(tuple(messages), parse_tools(record.get(tools)) if tools else ())


def _get(record: Mapping[str, Any], key: str | None) -> Any:
    return None if key is None else record.get(key)


@lru_cache(maxsize=64)  # the records of a file have few distinct sets of keys
def _check_keys(keys: frozenset[str], optional: tuple[str | None, ...]) -> None:
    """Raise RecordError for a key that is nearly the name of a missing optional one, which would be silently lost."""
    absent = [key for key in optional if key and key not in keys]
    for key in sorted(keys - set(optional), key=str):
        if close := get_close_matches(str(key), absent, n=1, cutoff=0.8):
            raise RecordError(f"unknown key {key!r}; did you mean {close[0]!r}?")


def text_of(content: Any, where: str) -> str:
    """Return a text as it is, a list of text parts joined, and "" for null. Raises RecordError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise RecordError(f"{where}: expected a text or a list of text parts, got {content!r:.60}")


def new_message(role: str, text: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked message. Raises RecordError for a turn without content, where it needs some.

    role: a template's role, or `function_call`, whose text is the JSON of one tool call or a list of them.
    extras: further keys of the message, of MESSAGE_EXTRAS.
    """
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(_parsed(text, "function call"))}
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

    value: a list of JSON schemas, or its JSON text; empty or null for none.
    """
    tools = _parsed(value, "tools") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"tools: expected a list of JSON schemas, got {value!r:.60}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


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
    envelope = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **envelope, "function": {**function, "arguments": arguments}}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what}: not valid JSON: {error}") from None
