"""Records of chats: every format as the same conversation, and what is wrong named by turn and key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain_ray.io.chat.conversation_formats import LAYOUTS, ChatFormat, read_conversation
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError

Record = dict[str, Any]
CALL = {"name": "add", "arguments": {"n": 2}}
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


def said(*turns: tuple[str, str]) -> list[Record]:
    return [{"role": role, "content": content} for role, content in turns]


def read(record: Any, chat_format: ChatFormat = "auto") -> Conversation:
    return read_conversation(record, LAYOUTS[chat_format])


SAME: dict[str, tuple[ChatFormat, Record]] = {
    "alpaca": ("alpaca", {"instruction": "R", "input": "", "output": "B", "system": "S", "history": [["Q", "A"]]}),
    "sharegpt": (
        "sharegpt",
        {
            "system": "S",
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "gpt", "value": "A"},
                {"from": "user", "value": "R"},
                {"from": "assistant", "value": "B"},
            ],
        },
    ),
    "messages": (
        "messages",
        {"messages": said(("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "B"))},
    ),
    "prompt_completion": (
        "prompt_completion",
        {"prompt": said(("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R")), "completion": "B"},
    ),
    "prompt and a message": (
        "prompt_completion",
        {"prompt": said(("user", "Q"), ("assistant", "A"), ("user", "R")), "completion": said(("assistant", "B"))[0]}
        | {"system": "S"},
    ),
}


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("name", SAME)
def test_the_same_conversation_in_every_format(name: str, stated: bool) -> None:
    chat_format, record = SAME[name]
    got = read(record | {"id": 7, "source": "x"}, chat_format if stated else "auto")
    expected = said(("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "B"))
    assert list(got.messages) == expected
    assert got.tools == ()


def test_alpaca_joins_instruction_and_input_by_a_line_end() -> None:
    assert read({"instruction": "Add.", "input": "2, 2", "output": "4"}).messages[0]["content"] == "Add.\n2, 2"
    assert read({"instruction": "", "input": "2, 2", "output": "4"}).messages[0]["content"] == "2, 2"


def test_turns_may_stand_under_either_name_in_either_form() -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    expected = said(("user", "Q"), ("assistant", "A"))
    assert list(read({"messages": turns}).messages) == list(read({"conversations": expected}).messages) == expected


def test_parts_of_text_are_joined_and_keys_without_a_value_are_nothing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    record = {"messages": [{"role": "user", "content": parts, "name": None, "weight": None}], "images": None}
    assert list(read(record).messages) == said(("user", "ab"))


def test_turns_say_how_much_they_are_learned() -> None:
    """Turns of others may say that they are not learned, as some programs write for each turn."""
    flags: list[Record] = [{"train": False}, {"train": True}, {"weight": 0}, {"weight": 0.5, "train": True}]
    answers = [ANSWER | flag for flag in flags]
    turns = [USER | {"train": False, "weight": None}, *answers]
    assert read({"messages": turns, "system": "S"}).answers == [(3, 1.0), (5, 0.5)]
    last = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}, {"from": "gpt", "value": "B"}]
    assert read({"conversations": last}).with_last_only().answers == [(2, 1.0)]
    assert read({"prompt": [USER, ANSWER, USER], "completion": [ANSWER, USER, ANSWER]}).answers == [(3, 1.0), (5, 1.0)]


@pytest.mark.parametrize("arguments", [{"n": 2}, '{"n": 2}'], ids=["mapping", "text"])
def test_tool_calls_reach_the_template_in_one_form(arguments: Any) -> None:
    own = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [own]}
    result = {"role": "tool", "content": "", "tool_call_id": "c1"}
    got = read({"messages": [*said(("user", "Q")), answer, result], "tools": [{"type": "function", "function": TOOL}]})
    assert got.messages[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": CALL}]
    assert got.messages[1]["content"] is None
    assert got.messages[2] == result
    assert got.tools == ({"type": "function", "function": TOOL},)
    assert "tool_calls" not in read({"messages": [USER, ANSWER | {"tool_calls": []}]}).messages[1]


@pytest.mark.parametrize("calls", [CALL, [CALL, CALL]])
def test_sharegpt_calls_are_tool_calls_of_the_assistant(calls: Any) -> None:
    turns = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": json.dumps(calls)},
        {"from": "observation", "value": "4"},
        {"from": "tool", "value": "5"},
        {"from": "gpt", "value": "A"},
    ]
    got = read({"conversations": turns, "tools": json.dumps([TOOL])})
    count = len(calls) if isinstance(calls, list) else 1
    assert got.messages[1]["role"] == "assistant"
    assert got.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}] * count
    assert read({"conversations": turns, "tools": [json.dumps(TOOL)]}).tools == got.tools
    assert [m["role"] for m in got.messages[2:]] == ["tool", "tool", "assistant"]
    assert got.tools == ({"type": "function", "function": TOOL},)


def alpaca(**keys: Any) -> Record:
    return {"instruction": "Q", "output": "A", **keys}


def turns(*turns: Any, **keys: Any) -> Record:
    return {"messages": list(turns), **keys}


USER, ANSWER = said(("user", "Q"), ("assistant", "A"))

# name: (record, stated format, what is said)
BAD: dict[str, tuple[Any, ChatFormat, str]] = {
    "a text": ("Q", "auto", "expected a mapping, got 'Q'"),
    "a list": ([USER], "auto", "expected a mapping, got [{'role'"),
    "no format": ({"question": "Q", "answer": "A"}, "auto", "its keys ('question', 'answer') fit no known format"),
    "null": (
        {"prompt": "Q", "completion": None},
        "auto",
        "its keys ('prompt', 'completion': null) fit no known format",
    ),
    "no keys": ({}, "auto", "its keys (none) fit no known format"),
    "two formats": (alpaca(messages=[USER]), "auto", "fit several formats at once"),
    "two lists": (turns(USER, conversations=[USER]), "auto", "fit several formats at once"),
    "another format": (
        alpaca(),
        "sharegpt",
        "conversations: expected a list of turns, got none (keys: 'instruction', 'output')",
    ),
    "no output": ({"instruction": "Q"}, "alpaca", "no key 'output'; its keys are 'instruction'"),
    "null output": (alpaca(output=None), "auto", "empty turn of assistant"),
    "empty question": (alpaca(instruction=" \n"), "auto", "empty turn of user"),
    "number": (alpaca(output=4), "auto", "output: expected a text or a list of text parts, got 4"),
    "history": (alpaca(history=["Q", "A"]), "auto", "history: expected a list of [question, answer]"),
    "typo": (alpaca(inputs="x"), "auto", "unknown key 'inputs'; did you mean 'input'?"),
    "preferences": (
        turns(USER, ANSWER, rejected="B"),
        "auto",
        "rejected: is of a preference, which data.kind: pairs reads",
    ),
    "images": (turns(USER, ANSWER, images=["a.png"]), "auto", "images: read with data.images: true only"),
    "no turns": (turns(), "auto", "messages: expected a list of turns, got []"),
    "turns as text": ({"messages": "Q"}, "auto", "messages: expected a list of turns, got 'Q'"),
    "turn as text": (turns(USER, "A"), "auto", "turn 2: expected a mapping with role and content, got 'A'"),
    "turn without role": (turns(USER, {"content": "A"}), "auto", "turn 2: expected a mapping with role and content"),
    "role": (
        turns(USER, {"role": "model", "content": "A"}),
        "auto",
        "turn 2: unknown role 'model'; expected one of system,",
    ),
    "role, typed wrong": (
        turns({"role": "Usr", "content": "Q"}),
        "auto",
        "turn 1: unknown role 'Usr'; did you mean 'user'?",
    ),
    "key of roles, typed wrong": (
        turns({"rol": "user", "content": "Q"}),
        "auto",
        "turn 1: unknown key 'rol'; did you mean 'role'?",
    ),
    "key of a turn, typed wrong": (
        turns(USER, {"role": "assistant", "contents": "A"}),
        "auto",
        "turn 2: unknown key 'contents'; did you mean 'content'?",
    ),
    "key of turns, typed wrong": ({"mesages": [USER]}, "auto", "unknown key 'mesages'; did you mean 'messages'?"),
    "the same, stated": ({"mesages": [USER]}, "messages", "unknown key 'mesages'; did you mean 'messages'?"),
    "key of an answer, typed wrong": (
        {"prompt": "Q", "completions": "A"},
        "auto",
        "unknown key 'completions'; did you mean 'completion'?",
    ),
    "sharegpt role": (
        {"conversations": [{"from": "bing", "value": "A"}]},
        "auto",
        "turn 1: unknown role 'bing'; expected one of system,",
    ),
    "empty turn": (
        turns(USER, {"role": "assistant", "content": ""}),
        "auto",
        "turn 2 (assistant): empty turn of assistant",
    ),
    "null content": (turns({"role": "user"}, ANSWER), "auto", "turn 1 (user): empty turn of user"),
    "content": (turns({"role": "user", "content": {"text": "Q"}}), "auto", "turn 1 (user): content: expected a text"),
    "image part": (
        turns({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
        "auto",
        "content: holds an image, read with data.images: true only",
    ),
    "image with a text": (
        turns({"role": "user", "content": [{"type": "image", "text": ""}, {"type": "text", "text": "Q"}]}),
        "auto",
        "content: holds an image, read with",
    ),
    "key of a turn": (
        turns(USER, ANSWER | {"wait": 0}),
        "auto",
        "turn 2: unknown key 'wait'; expected role, content, ",
    ),
    "weight": (turns(USER, ANSWER | {"weight": -1}), "auto", "weight: expected a number of 0 and more, got -1"),
    "weight as a flag": (turns(USER, ANSWER | {"weight": True}), "auto", "weight: expected a number of 0 and more"),
    "train": (turns(USER, ANSWER | {"train": 1}), "auto", "turn 2 (assistant): train: expected true or false, got 1"),
    "user to learn": (turns(USER | {"train": True}, ANSWER), "auto", "train: only turns of the assistant are learned"),
    "KTO": ({"prompt": "Q", "completion": "A", "label": True}, "auto", "label: says whether the answer is good, which"),
    "no completion": ({"prompt": "Q"}, "prompt_completion", "no key 'completion'; its keys are 'prompt'"),
    "empty completion": ({"prompt": "Q", "completion": ""}, "auto", "empty turn of assistant"),
    "turn of a prompt": (
        {"prompt": [{"role": "x"}], "completion": "A"},
        "auto",
        "prompt, turn 1: unknown role 'x'; expected one of",
    ),
    "two systems": (turns({"role": "system", "content": "S"}, USER, system="T"), "auto", "two system texts"),
    "tools": (turns(USER, ANSWER, tools="{"), "auto", "tools: not valid JSON"),
    "weight beyond FP32": (turns(USER, ANSWER | {"weight": 1e39}), "auto", "weight: expected a number of 0 and more"),
    "weight beyond floats": (turns(USER, ANSWER | {"weight": 10**400}), "auto", "weight: expected a number of 0 and"),
    "tool without a schema": (
        turns(USER, ANSWER, tools=[{"function": "x"}]),
        "auto",
        "tools: expected a JSON schema under",
    ),
    "tools as number": (turns(USER, ANSWER, tools=3), "auto", "tools: expected a list of JSON schemas, got 3"),
    "call of a user": (turns(USER | {"tool_calls": [CALL]}), "auto", "turn 1 (user): tool_calls: only the assistant"),
    "call without a name": (
        turns(USER, {"role": "assistant", "tool_calls": [{"arguments": {}}]}),
        "auto",
        "turn 2 (assistant): tool call: expected",
    ),
    "call with bad arguments": (
        turns(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}),
        "auto",
        "arguments of a tool call",
    ),
    "arguments as a text in a text": (
        turns(USER, {"role": "assistant", "tool_calls": [CALL | {"arguments": json.dumps(json.dumps({"n": 2}))}]}),
        "auto",
        "arguments of a tool call: expected a mapping, or its JSON text, got '{",
    ),
    "no arguments": (
        turns(USER, {"role": "assistant", "tool_calls": [CALL | {"arguments": None}]}),
        "auto",
        "expected a mapping, or its JSON text, got None",
    ),
    "call as text": (
        {"conversations": [{"from": "function_call", "value": "add(2)"}]},
        "auto",
        "turn 1 (function_call): function call: not",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_say_what_is_wrong(name: str) -> None:
    record, chat_format, problem = BAD[name]
    with pytest.raises(RecordError) as error:
        read(record, chat_format)
    assert problem in str(error.value)
