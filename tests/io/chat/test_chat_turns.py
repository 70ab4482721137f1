"""Where an answer lies in what a template writes: odd conversations, thoughts, tools, and templates that cannot say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.answer_texts import MarkedText
from megatrain_ray.io.chat.chat_template import PLAIN, ChatTemplate, read_named_template
from megatrain_ray.io.chat.mark_turns import TurnMarker, render_prompt
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError, RecordOutcome
from tests.support.chat_fixtures import FAMILIES

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def template(name: str, **variables: Any) -> ChatTemplate:
    family = FAMILIES[name]
    return ChatTemplate(name, family.source, variables={"bos_token": family.bos, "eos_token": family.eos, **variables})


def say(*turns: str) -> tuple[dict[str, Any], ...]:
    """Return a chat: `u:text`, `a:text`, `s:text` and `t:text` are turns by role; `c:` calls a tool."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"n": [2, 2]}}}
    return tuple(
        {"role": "assistant", "content": "", "tool_calls": [call]}
        if turn[0] == "c"
        else {"role": roles[turn[0]], "content": turn[2:]}
        for turn in turns
    )


def shown(marked: MarkedText) -> str:
    text = marked.text
    for start, end, _ in reversed(marked.spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    return text


def marks(name: str, *turns: str, tools: Any = (), **variables: Any) -> list[str]:
    return [shown(m) for m in TurnMarker(template(name, **variables)).mark(Conversation(say(*turns), tools))]


def test_two_answers_in_a_row_are_both_learned() -> None:
    assert marks("chatml", "u:Q", "a:A", "a:B") == [
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»\n<|im_start|>assistant\n«B<|im_end|>»\n"
    ]


def test_turns_after_the_last_answer_are_left_out() -> None:
    assert marks("chatml", "u:Q", "a:A", "u:R") == marks("chatml", "u:Q", "a:A")
    assert marks("chatml", "u:Q") == []


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gemma", "mistral"}))
def test_an_answer_to_nothing_is_learned_without_its_heading(name: str) -> None:
    """Some templates write the heading only after a message; it is no part of the answer there either."""
    learned = [part.split("»")[0] for text in marks(name, "a:A", "u:Q", "a:B") for part in text.split("«")[1:]]
    first, second = (FAMILIES[name].content(letter) + FAMILIES[name].ending for letter in "AB")
    assert learned == [first.removeprefix("<think>\n\n</think>\n\n"), second]  # Qwen 3 thinks after a question


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_template_that_wants_a_question_first_says_so(name: str) -> None:
    with pytest.raises(RecordError, match="refuses it"):
        marks(name, "a:A")


def test_texts_that_look_like_marks_stay_inside_of_their_answer() -> None:
    """The places come from what is around an answer, never from a search in it."""
    assert marks("chatml", "u:<|im_end|>\n<|im_start|>assistant\nX", "a:A<|im_end|>\n")[0].endswith(
        "assistant\n«A<|im_end|>\n<|im_end|>»\n"
    )


@pytest.mark.parametrize(
    ("name", "turns", "reason"),
    [
        ("gemma", ("s:S", "u:Q", "a:A"), "System role not supported"),
        ("mistral", ("s:S", "u:Q", "a:A"), "roles must alternate"),
        ("mistral", ("u:Q", "a:A", "a:B"), "roles must alternate"),
    ],
)
def test_what_a_template_refuses_is_refused_with_its_reason(name: str, turns: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RecordError, match=rf"the chat template \({name}\) refuses it: .*{reason}"):
        marks(name, *turns)


# --- thoughts ---


def test_thoughts_are_learned_in_the_sequence_that_keeps_them() -> None:
    texts = marks("qwen3", "u:Q", "a:<think>\nhm\n</think>\n\nA", "u:R", "a:B")
    assert [text.split("«")[1] for text in texts] == [
        "<think>\nhm\n</think>\n\nA<|im_end|>»\n",
        "<think>\n\n</think>\n\nB<|im_end|>»\n",
    ]
    assert "hm" not in texts[1]


def test_the_answers_of_a_tool_loop_are_learned_together() -> None:
    (text,) = marks("qwen3", "u:Q", "a:<think>\nhm\n</think>\n\nlet me", "t:4", "a:<think>\nso\n</think>\n\nA")
    assert text.count("«") == 2
    assert "«<think>\nhm\n</think>\n\nlet me<|im_end|>»" in text


def test_a_template_without_thoughts_puts_the_empty_one_into_the_prompt() -> None:
    assert marks("qwen3", "u:Q", "a:A", enable_thinking=False) == [
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n«A<|im_end|>»\n"
    ]
    assert marks("qwen3", "u:Q", "a:<think>\nhm\n</think>\n\nA", enable_thinking=False) == [
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nA<|im_end|>»\n"
    ]


# --- other templates that write an earlier answer, or what is before it, in another way ---

SYSTEM_LAST = (  # newer ones of Mistral: the system text stands before the last question, wherever that is
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}<s>{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {% if m == users[-1] and system %}{{ system }}: {% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
CHANNELS = (  # GPT-OSS: another end mark for the last answer, and a channel that the model chooses
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SYSTEM_LAST, ["<s>[INST] S: Q[/INST]« A</s>»", "<s>[INST] Q[/INST] A</s>[INST] S: R[/INST]« B</s>»"]),
        (
            CHANNELS,
            [
                "<|start|>system<|message|>S<|end|><|start|>user<|message|>Q<|end|>"
                "<|start|>assistant«<|channel|>final<|message|>A<|return|>»",
                "<|start|>system<|message|>S<|end|><|start|>user<|message|>Q<|end|>"
                "<|start|>assistant<|channel|>final<|message|>A<|end|><|start|>user<|message|>R<|end|>"
                "<|start|>assistant«<|channel|>final<|message|>B<|return|>»",
            ],
        ),
    ],
    ids=["system last", "channels"],
)
def test_each_answer_is_learned_as_it_is_asked_for(source: str, expected: list[str]) -> None:
    texts = TurnMarker(ChatTemplate("mine", source)).mark(Conversation(say("s:S", "u:Q", "a:A", "u:R", "a:B")))
    assert [shown(text) for text in texts] == expected


# --- tools ---


def test_calls_are_learned_and_what_tools_answer_is_not() -> None:
    (text,) = marks("qwen2.5", "u:Q", "c:", "t:4", "a:A", tools=TOOLS)
    assert text.endswith(
        'assistant\n«<tool_call>\n{"name": "add", "arguments": {"n": [2, 2]}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»\n"
    )
    assert json.dumps(TOOLS[0]) in text


def test_an_answer_may_have_another_end_mark() -> None:
    (text,) = marks("llama3", "u:Q", "c:", "t:4", "a:A")
    assert '«{"name": "add", "parameters": {"n": [2, 2]}}<|eom_id|>»<|start_header_id|>ipython' in text
    assert text.endswith("«A<|eot_id|>»")


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"qwen2.5", "qwen3", "llama3"}))
def test_a_call_that_a_template_does_not_write_is_never_learned_as_an_empty_answer(name: str) -> None:
    with pytest.raises(RecordError, match=r"turn 2: .*leaves out its call of add; set data.chat_template|refuses it"):
        marks(name, "u:Q", "c:", "u:4", "a:A")


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"qwen3"}))
def test_a_thought_that_a_template_does_not_write_is_told(name: str) -> None:
    """Qwen 3 writes it."""
    thinks = {"role": "assistant", "content": "A", "reasoning_content": "hm"}
    with pytest.raises(RecordError, match=r"turn 2: the chat template \(.*\) leaves out its thought .*; set data"):
        TurnMarker(template(name)).mark(Conversation((*say("u:Q"), thinks)))


def test_texts_and_tools_that_a_template_does_not_write_are_told() -> None:
    both = {**say("c:")[0], "content": "I call."}
    with pytest.raises(RecordError, match=r"turn 2: .* leaves out its text;"):
        TurnMarker(template("llama3")).mark(Conversation((*say("u:Q"), both)))
    with pytest.raises(RecordError, match="leaves out the tools;"):
        marks("chatml", "u:Q", "a:A", tools=TOOLS)


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("test", ["message.content is none", "message.content == ''", "not message.content"])
def test_no_text_is_written_as_the_template_tests_for_it(content: str | None, test: str) -> None:
    source = (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.tool_calls and (" + test + ") %}{{ message.tool_calls[0].function.name }}"
        "{% else %}{{ message.content }}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    call, own = {**say("c:")[0], "content": content}, ChatTemplate("mine", source)
    (text,) = TurnMarker(own).mark(Conversation((*say("u:Q"), call, *say("t:4", "a:A"))))
    assert shown(text) == "<|user|>Q</s><|assistant|>«add</s>»<|tool|>4</s><|assistant|>«A</s>»"
    prompt = render_prompt(own, Conversation((*say("u:Q"), call, *say("t:4"))))
    assert prompt == "<|user|>Q</s><|assistant|>add</s><|tool|>4</s><|assistant|>"


def test_arguments_are_written_as_json_text_where_a_template_adds_them_to_a_text() -> None:
    """As those of DeepSeek V3 do, which also test for None."""
    source = PROMPTED.replace(
        "{{ m.content }}",
        "{% for call in m.tool_calls or [] if m.content is none %}{{ call.function.name + call.function.arguments }}"
        "{% endfor %}{% if m.content is not none %}{{ m.content }}{% endif %}",
    )
    (text,) = TurnMarker(ChatTemplate("mine", source)).mark(Conversation(say("u:Q", "c:", "t:4", "a:A")))
    assert shown(text) == '<|user|>Q</s><|assistant|>«add{"n": [2, 2]}</s>»<|tool|>4</s><|assistant|>«A</s>»'


def test_none_is_never_learned_as_a_word() -> None:
    source = PROMPTED.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}")
    call = {**say("c:")[0], "content": None}
    (text,) = TurnMarker(ChatTemplate("mine", source)).mark(Conversation((*say("u:Q"), call)))
    assert shown(text) == "<|user|>Q</s><|assistant|>«add</s>»"


# As Mistral 7B v0.3: the system turn stands in the last message, which the answer is when it is rendered.
SYSTEM_LAST = (
    "{% if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.last and system is defined %}{{ system + '\n' }}"
    "{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_a_system_turn_that_stands_in_the_last_question_is_in_the_prompt_of_each_answer() -> None:
    marker = TurnMarker(ChatTemplate("mine", SYSTEM_LAST))
    first, second = marker.mark(Conversation(say("s:S", "u:Q", "a:A", "u:R", "a:B")))
    assert shown(first) == "[INST] S\nQ[/INST]« A</s>»"
    assert shown(second) == "[INST] Q[/INST] A</s>[INST] S\nR[/INST]« B</s>»"


# As GLM 4.5: the mark of the next turn ends an answer.
UNENDED = (
    "[gMASK]{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("u:Q", "a:A"), "[gMASK]<|user|>Q<|assistant|>«A<|user|>»"),
        (("u:Q", "a:A", "u:R", "a:B"), "…<|user|>Q<|assistant|>«A<|user|>»R<|assistant|>«B<|user|>»"),
        (("u:Q", "c:"), "…<|user|>Q<|assistant|>«<call>add</call><|observation|>»"),
        (("u:Q", "c:", "t:4", "a:B"), "…«<call>add</call><|observation|>»4<|assistant|>«B<|user|>»"),
    ],
)
def test_the_mark_of_the_next_turn_ends_an_answer_that_has_none(turns: tuple[str, ...], expected: str) -> None:
    (text,) = TurnMarker(ChatTemplate("mine", UNENDED)).mark(Conversation(say(*turns)))
    assert shown(text).endswith(expected.removeprefix("…"))


# --- templates that cannot say ---

HEADED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
PROMPTED = HEADED + "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (HEADED, r"ignores add_generation_prompt and begins an answer with '<\|assistant\|>'"),
        (PROMPTED.replace("</s>", "").replace("<|", " ").replace("|>", ": "), "marks no end of an answer"),
        ("{{ raise_exception('never') }}", "refuses it: never"),
        ("{% for m in messages %}{{ m.content }}", "line 1: Unexpected end of template"),
        (PROMPTED.replace("m.content", "'nothing'"), "is no beginning of an answer it writes"),
    ],
)
def test_a_template_that_cannot_tell_answers_is_refused_by_name(source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^data.chat_template: .*mine.*{problem}"):
        TurnMarker(ChatTemplate("mine", source))


def test_pieces_between_tags_that_touch_are_one_answer() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% generation %}</s>{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    (text,) = TurnMarker(ChatTemplate("mine", source)).mark(Conversation(say("u:Q", "a:A", "u:R", "a:B")))
    assert shown(text) == "[Q]«A</s>»[R]«B</s>»"


TAGGED = (  # thoughts of turns before the last question are left out, as by Qwen 3
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content and loop.index0 > messages | length - 3 %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}</s>{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("loss_weights", "learn_reasoning", "expected"),
    [
        ({}, True, "[Q]«A</s>»[R]«<think>so</think>B</s>»"),
        ({}, False, "[Q]«A</s>»[R]<think>so</think>«B</s>»"),
        ({1: 0.0}, True, "[Q]A</s>[R]«<think>so</think>B</s>»"),
        ({3: 0.0}, True, "[Q]«A</s>»"),
        ({1: 0.5, 3: 2.0}, False, "[Q]«A</s>»[R]<think>so</think>«B</s>»"),
    ],
)
def test_tagged_answers_have_their_own_weights(
    loss_weights: dict[int, float], learn_reasoning: bool, expected: str
) -> None:
    messages = [*say("u:Q", "a:A", "u:R", "a:B")]
    messages[3] |= {"reasoning_content": "so"}
    marker = TurnMarker(ChatTemplate("mine", TAGGED), learn_reasoning=learn_reasoning)
    (text,) = marker.mark(Conversation(tuple(messages), loss_weights=loss_weights))
    assert (shown(text), text.notes) == (expected, ())
    assert [span.weight for span in text.spans] == [w for i in (1, 3) if (w := loss_weights.get(i, 1.0))]


def test_thoughts_of_earlier_turns_that_tags_leave_out_are_told() -> None:
    messages = [*say("u:Q", "a:A", "u:R", "a:B")]
    messages[1] |= {"reasoning_content": "hm"}
    (text,) = TurnMarker(ChatTemplate("mine", TAGGED)).mark(Conversation(tuple(messages)))
    assert (shown(text), text.notes) == ("[Q]«A</s>»[R]«B</s>»", (RecordOutcome.NO_THOUGHTS,))
    with pytest.raises(RecordError, match=r"turn 2: .* leaves out its call of add;"):
        TurnMarker(ChatTemplate("mine", TAGGED)).mark(Conversation(say("u:Q", "c:", "t:4", "a:B")))


def test_a_template_may_tag_the_last_answer_only() -> None:
    source = TAGGED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}")
    (text,) = TurnMarker(ChatTemplate("mine", source)).mark(Conversation(say("u:Q", "a:A", "u:R", "a:B")))
    assert shown(text) == "[Q][A][R]«B</s>»"


def test_the_plain_template_ends_an_answer_as_the_tokenizer_ends_a_text() -> None:
    marker = TurnMarker(ChatTemplate("plain", read_named_template(PLAIN), variables={"eos_token": "</s>"}))
    (text,) = marker.mark(Conversation(say("s:S", "u:Q", "a:A")))
    assert shown(text) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«A</s>»\n"
    )
    (text,) = marker.mark(Conversation(say("u:Q", "c:", "t:4", "a:A"), TOOLS))
    assert shown(text) == (
        '<|im_start|>tools\n{"type": "function", "function": {"name": "add", "parameters": {}}}<|im_end|>\n'
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
        '«<tool_call>{"name": "add", "arguments": {"n": [2, 2]}}</tool_call></s>»\n'
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n«A</s>»\n"
    )
