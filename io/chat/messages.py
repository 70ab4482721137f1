"""Checks one message of a conversation and brings it into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatrain_ray.io.records.read_records import RecordError

# Keys that a turn may have in addition to role and content; templates read these names.
MESSAGE_EXTRAS = frozenset({"tool_calls", "tool_call_id", "name", "reasoning_content", "thinking"})


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
    """Return a checked message.

    role: a template's role, or `function_call`, whose text is the JSON of one tool call or a list of them.
    extras: further keys of the message, of MESSAGE_EXTRAS.

    Raises RecordError for a turn without content. Only a tool's answer and an assistant's tool call may be empty.
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
    """Return the tools of a record, each in the envelope {"type": "function", "function": …}.

    value: a list of JSON schemas, or its JSON text; empty or null for none.

    Raises RecordError for anything else.
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
