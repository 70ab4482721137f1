"""What published chat templates do around an answer. Each way is written in its shortest form, after the models named.

`«` and `»` enclose what is learned.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatrain_ray.io.chat.answer_texts import MarkedText
from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.mark_turns import TurnMarker
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError, RecordOutcome
from tests.support.chat_fixtures import TEMPLATES

Messages = tuple[dict[str, Any], ...]

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
R, B = {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}
THOUGHT = {**A, "reasoning_content": "hm"}
CALL = {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"n": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "call_1"}


def mark(source: str, *messages: dict[str, Any], tools: Any = (), learn_reasoning: bool = True) -> list[MarkedText]:
    template = ChatTemplate("mine", source, variables={"eos_token": "<e>"})
    return TurnMarker(template, learn_reasoning=learn_reasoning).mark(Conversation(messages, tools))


def shown(marked: MarkedText) -> str:
    text = marked.text
    for start, end, _ in reversed(marked.spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    return text


def turns(answer: str, prompt: str, system: str = "") -> str:
    """Return a template that writes answers (`t`: the thought, `a`: the content) and prompts like this."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% set a = m.content %}{% set t = m.reasoning_content %}"
        + answer
        + "{% elif m.role != 'system' %}<u>{{ m.content }}{% else %}"
        + system
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )


# --- prompts that open a thought ---

MINIMAX_M2 = turns("<a>{% if t %}<think>\n{{ t }}\n</think>\n\n{% endif %}{{ a }}<e>", "<a><think>\n")
GLM_47 = turns("<a>{{ '<think>' + t if t }}</think>{{ a }}<e>", "<a><think>")
NEMOTRON_3 = turns("<a>\n{{ '<think>\n' + t if t else '<think>' }}</think>{{ a }}<e>", "<a>\n<think>\n")
QWEN_35 = turns("<a>\n{{ '<think>\n' + t + '\n</think>\n\n' if t }}{{ a }}<e>", "<a>\n<think>\n\n</think>\n\n")
COMMAND_A = turns(
    "<a>{{ '<|START_THINKING|>' + t + '<|END_THINKING|>' if t }}<|START_TEXT|>{{ a }}<e>", "<a><|START_THINKING|>"
)
GEMMA_4 = turns(
    "<a>\n{{ '<|channel>thought\n' + t + '\n<channel|>' if t }}{{ a }}<e>", "<a>\n<|channel>thought\n<channel|>"
)


@pytest.mark.parametrize(
    ("source", "with_thought", "without", "unlearned"),
    [
        (MINIMAX_M2, "<a><think>\n«hm\n</think>\n\nA<e>»", "<a>«A<e>»", "<a><think>\nhm\n</think>\n\n«A<e>»"),
        (GLM_47, "<a><think>«hm</think>A<e>»", "<a>«</think>A<e>»", "<a><think>hm</think>«A<e>»"),
        (NEMOTRON_3, "<a>\n<think>\n«hm</think>A<e>»", "<a>\n«<think></think>A<e>»", "<a>\n<think>\nhm</think>«A<e>»"),
        (QWEN_35, "<a>\n«<think>\nhm\n</think>\n\nA<e>»", "<a>\n«A<e>»", "<a>\n<think>\nhm\n</think>\n\n«A<e>»"),
        (
            COMMAND_A,
            "<a><|START_THINKING|>«hm<|END_THINKING|><|START_TEXT|>A<e>»",
            "<a>«<|START_TEXT|>A<e>»",
            "<a><|START_THINKING|>hm<|END_THINKING|>«<|START_TEXT|>A<e>»",
        ),
        (
            GEMMA_4,
            "<a>\n«<|channel>thought\nhm\n<channel|>A<e>»",
            "<a>\n«A<e>»",
            "<a>\n<|channel>thought\nhm\n<channel|>«A<e>»",
        ),
    ],
    ids=["MiniMax-M2", "GLM-4.7", "Nemotron 3", "Qwen3.5", "Command A", "Gemma 4"],
)
def test_answers_are_learned_with_and_without_the_thought_of_the_prompt(
    source: str, with_thought: str, without: str, unlearned: str
) -> None:
    (thought,), (plain,) = mark(source, Q, THOUGHT), mark(source, Q, A, R, B)
    assert shown(thought) == f"<u>Q{with_thought}"
    assert shown(plain) == f"<u>Q{without}<u>R{without.replace('A<e>', 'B<e>')}"
    assert RecordOutcome.UNOPENED in {*thought.notes, *plain.notes}
    (text,) = mark(source, Q, THOUGHT, learn_reasoning=False)
    assert shown(text) == f"<u>Q{unlearned}"


@pytest.mark.parametrize(
    ("source", "unlearned"),
    [
        (turns("<a>{{ '<think>' + t + '</think>' if t }}{{ a }}", "<a>"), "<u>Q<a><think>hm</think>«A<u>»"),
        (  # Mistral's: the system turn is written only with a question that comes last
            "{% for m in messages %}{% if m.role == 'user' %}"
            "{{ messages[0].content if loop.last and messages[0].role == 'system' }}<u>{{ m.content }}"
            "{% elif m.role == 'assistant' %}<a><think>{{ m.reasoning_content }}</think>{{ m.content }}<e>{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
            "Be brief.<u>Q<a><think>hm</think>«A<e>»",
        ),
    ],
    ids=["no mark after an answer", "written otherwise without it"],
)
def test_a_thought_is_not_learned_where_the_text_is_not_just_what_the_template_writes(
    source: str, unlearned: str
) -> None:
    system = [{"role": "system", "content": "Be brief."}] * unlearned.startswith("Be")
    (text,) = mark(source, *system, Q, THOUGHT, learn_reasoning=False)
    assert shown(text) == unlearned


def test_a_thought_that_is_never_written_is_refused() -> None:
    source = (TEMPLATES / "deepseek_r1.jinja").read_text()
    (text,) = mark(source, Q, A)
    assert shown(text).endswith("<｜Assistant｜>«A<｜end▁of▁sentence｜>»")
    assert text.notes == (RecordOutcome.UNOPENED,)
    with pytest.raises(RecordError, match=r"turn 2: .* leaves out its thought .*, or take it out of the record"):
        mark(source, Q, {**A, "content": "<think>\nhm\n</think>\n\nA"})


# --- what stands after an answer ---

CLOSED = turns("<a>{{ a }}<e>", "<a>").replace("{% if add", "{{ '<end>' if not add_generation_prompt }}{% if add")
ALWAYS = turns("<a><r>{{ a }}</r><e>", "").replace("{% if add_generation_prompt %}{% endif %}", "<a>")
WITH_REPLY = ALWAYS + "{{ '<r>' if add_generation_prompt }}"
OTHER_MARK = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<t>{% endfor %}<a>"
ROLE_AS_TEXT = "{% for m in messages %}<x>{{ m.role[0] }}\n{{ m.content }}\n{% endfor %}{{ '<x>a\n' }}"
GLM_51 = turns("<a>{{ '' if loop.last else '</think>' }}{% if loop.last %}<think></think>{% endif %}{{ a }}", "<a>")


@pytest.mark.parametrize(
    ("source", "heading", "expected"),
    [
        (CLOSED, "<a>", "<u>Q<a>«A<e>»<u>R<a>«B<e>»<end>"),  # Hunyuan closes the conversation with a mark
        # Those from Command R on always ask for an answer. Dolphin's eos token is another one than its end mark.
        (ALWAYS, "<a>", "<u>Q<a>«<r>A</r><e>»<u>R<a>«<r>B</r><e>»<a>"),
        (WITH_REPLY, "<a><r>", "<u>Q<a><r>«A</r><e>»<u>R<a><r>«B</r><e>»<a>"),
        (OTHER_MARK, "<a>", "<u>Q<t><a>«A<t>»<u>R<t><a>«B<t>»<a>"),
        (ROLE_AS_TEXT, "<x>a\n", "<x>u\nQ\n<x>a\n«A\n<x>»u\nR\n<x>a\n«B\n<x>»a\n"),
        (GLM_51, "<a>", "<u>Q<a></think>A<u>R<a>«<think></think>B<u>»"),  # and has no mark of its own after an answer
    ],
    ids=["Hunyuan", "Command R", "Command A", "Dolphin", "Nemotron Mini", "GLM-5.1"],
)
def test_an_answer_ends_where_the_model_is_to_stop(source: str, heading: str, expected: str) -> None:
    assert shown(mark(source, Q, A, R, B)[-1]) == expected
    (text,) = mark(source, B)
    assert shown(text) == expected[expected.rindex(f"{heading}«") :]


# --- tools ---

NAMED = "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}</c>{% endfor %}"
TOLD = "{{ tools | tojson if tools }}"
APERTUS = TOLD + turns(
    "{% if not loop.previtem or loop.previtem.role == 'user' %}<a>{% endif %}{{ a }}" + NAMED, "<a>"
).replace("<u>{{ m.content }}", "{{ '[' + m.content + ']' if m.role == 'tool' else '<e><u>' + m.content }}")
GPT_OSS = TOLD + turns(
    "<a>{{ '<t>' + t + '</t>' if t and (messages[-1].tool_calls or messages[-1].role != 'assistant') }}{{ a }}"
    + NAMED
    + "<e>",
    "<a>",
)
KIMI_K2 = TOLD + turns("<a>{{ a }}{% for c in m.tool_calls or [] %}<c>{{ c.id }}</c>{% endfor %}<e>", "<a>").replace(
    "<u>", "<u>{{ m.tool_call_id }}"
)
ENDLESS = TOLD + turns(
    "<a>{{ a }}" + NAMED + "{{ '<e>' if m.tool_calls is undefined or m.tool_calls | length > 1 }}", "<a>"
)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        # The result of a tool stands within the assistant's turn, and the prompt begins another.
        (APERTUS, (Q, CALLS, RESULT, A), "<u>Q<a>«<c>add</c>»[4]<a>«A<e>»"),
        # A thought before a call is left out once an answer follows.
        (GPT_OSS, (Q, {**CALLS, "reasoning_content": "hm"}, RESULT, A), "<u>Q<a>«<t>hm</t><c>add</c><e>»<u>4<a>«A<e>»"),
        # The id of a call is its name and number.
        (KIMI_K2, (Q, CALLS, RESULT, A), "<u>Q<a>«<c>functions.add:0</c><e>»<u>functions.add:04<a>«A<e>»"),
    ],
    ids=["Apertus", "GPT-OSS", "Kimi K2"],
)
def test_calls_and_what_follows_them_are_learned_as_asked_for(source: str, messages: Messages, expected: str) -> None:
    (text,) = mark(source, *messages, tools=TOOLS)
    assert shown(text).endswith(expected)


def test_a_call_that_would_never_end_is_refused() -> None:
    """DeepSeek-R1's template writes the end mark after the second call only."""
    with pytest.raises(RecordError, match=r"turn 2: .* writes no end after a single call"):
        mark(ENDLESS, Q, CALLS, tools=TOOLS)
    (text,) = mark(ENDLESS, Q, {**CALLS, "tool_calls": [CALL, CALL]}, tools=TOOLS)
    assert shown(text).endswith("<u>Q<a>«<c>add</c><c>add</c><e>»")


def test_a_template_for_tools_has_its_own_ends() -> None:
    """Command R7B has one, which always asks for an answer, beside one that does not."""
    plain, asking = turns("<a>{{ a }}<e>", "<a>"), turns("<a>{{ a }}" + NAMED + "<e>", "")
    always = TOLD + asking.replace("{% if add_generation_prompt %}{% endif %}", "<a>")
    marker = TurnMarker(ChatTemplate("mine", plain, always, variables={"eos_token": "<e>"}))
    (text,) = marker.mark(Conversation((Q, CALLS, RESULT, A), TOOLS))
    assert shown(text).endswith("<u>Q<a>«<c>add</c><e>»<u>4<a>«A<e>»<a>")
    (text,) = marker.mark(Conversation((Q, A)))
    assert shown(text) == "<u>Q<a>«A<e>»"
    useless = TurnMarker(ChatTemplate("mine", plain, TOLD, variables={"eos_token": "<e>"}))
    with pytest.raises(RecordError, match="cannot tell what the assistant wrote"):
        useless.mark(Conversation((Q, A), TOOLS))


# --- turns that a template leaves out ---

FIRST_SYSTEM = turns("<a>{{ a }}<e>", "<a>", "{{ '<s>' + m.content if loop.first }}").replace(
    "m.role != 'system'", "m.role in ('user', 'tool')"
)


def test_a_turn_that_the_template_leaves_out_is_refused() -> None:
    """Qwen's templates leave out a developer, Phi-4's a later system turn. The tools' text may be JSON."""
    later = {"role": "system", "content": "S"}
    with pytest.raises(RecordError, match=r"turn 3: .* leaves out this turn of system; .*, or take it out"):
        mark(FIRST_SYSTEM, Q, A, later, R, B)
    named = FIRST_SYSTEM.replace("if loop.first", "if m.role == 'system' and loop.first")
    (text,) = mark(named, {"role": "developer", "content": "S"}, Q, A)
    assert shown(text) == "<s>S<u>Q<a>«A<e>»"
    quoted, thrice = (FIRST_SYSTEM.replace("<u>{{ m.content", f"<u>{{{{ m.content | {f}") for f in ("tojson", "length"))
    asked = {"role": "user", "content": 'a "b"\n'}
    assert shown(mark(quoted, asked, A)[0]) == '<u>"a \\"b\\"\\n"<a>«A<e>»'
    assert shown(mark(thrice, asked, A)[0]) == "<u>6<a>«A<e>»"
