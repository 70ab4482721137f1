"""Finds the parts of a rendered conversation that the model must generate: each assistant turn and its end mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import ChatTemplate, Message
from megatrain_ray.io.chat.conversation_formats import Conversation
from megatrain_ray.io.records.read_records import RecordError

PROBE = "m3gaprobe"  # text that no template contains
QUESTION: Message = {"role": "user", "content": "Question"}
ANSWERS = (PROBE, f"<think>\nthought\n</think>\n\n{PROBE}")  # some templates open a thought in the prompt and keep it


class MarkedText(NamedTuple):
    """Holds a rendered conversation and its supervised character ranges [start, end)."""

    text: str
    spans: tuple[tuple[int, int], ...]


class _Turn(NamedTuple):
    text: str  # the conversation up to and including this turn
    start: int  # end of the prompt, in characters
    end: int  # end of the end mark, in characters

    @property
    def answered(self) -> str:
        return self.text[: self.end]


@dataclass(frozen=True)
class _Ending:
    """Describes the text after an answer: the end mark (`<|im_end|>`), then `blanks`, then `closing`."""

    blanks: str  # whitespace after the mark that the model need not generate
    closing: str  # eos token that closes the whole conversation; may be empty

    def cut(self, text: str) -> str:
        return text.removesuffix(self.closing).removesuffix(self.blanks)


class TurnMarker:
    """Finds the assistant turns in the text that a template renders of a conversation."""

    def __init__(self, template: ChatTemplate) -> None:
        """Learn how the template ends an answer by rendering a question and an answer.

        Raises ConfigError, naming the template, if it refuses them, if the text it renders for an answer does not begin
        with its prompt, if it ignores the prompt setting and writes the heading as part of the answer, or if it marks
        no end of an answer.
        """
        self._template = template
        self._ending = _Ending("", "") if template.marks_generation(()) else _probed(template)

    def mark(self, conversation: Conversation) -> list[MarkedText]:
        """Render a conversation and return its texts with the assistant turns marked.

        This is one text with all assistant turns if the template renders each turn the same now and later. Otherwise
        turns that are rendered differently later have texts of their own. Turns after the last answer are left out. A
        conversation without an answer has no texts.

        Raises RecordError if the template refuses the conversation, or if an answer does not begin where the prompt
        ends.
        """
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if not answers:
            return []
        messages, tools = conversation.messages[: answers[-1] + 1], conversation.tools
        if self._template.marks_generation(tools):
            text, places = self._template.render_marked(messages, tools)
            return [MarkedText(text, _joined(places))]
        return _grouped([self._turn(messages[: i + 1], tools) for i in answers])

    def _turn(self, messages: Sequence[Message], tools: Sequence[Message]) -> _Turn:
        prompt = self._template.render(messages[:-1], tools, prompt=True)
        text = self._template.render(messages, tools)
        answered = self._ending.cut(text)
        if not answered.startswith(prompt) or len(answered) == len(prompt):
            raise RecordError(
                f"turn {len(messages)}: the chat template ({self._template.name}) asks for an answer with "
                f"{prompt[-40:]!r} and then writes it otherwise"
            )
        return _Turn(text, len(prompt), len(answered))


def _grouped(turns: Sequence[_Turn]) -> list[MarkedText]:
    """Merge turns into as few texts as possible: the last turn's stands for all turns that it holds as answered."""
    texts: list[MarkedText] = []
    left = list(turns)
    while left:
        whole = left[-1].text
        held = [whole.startswith(turn.answered) for turn in left]
        spans = [(turn.start, turn.end) for turn, holds in zip(left, held, strict=True) if holds]
        texts.append(MarkedText(whole, tuple(spans)))
        left = [turn for turn, holds in zip(left, held, strict=True) if not holds]
    return texts[::-1]


def _joined(places: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that touch: tags may enclose the thought, content and end mark of one answer separately."""
    spans: list[tuple[int, int]] = []
    for start, end in places:
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return tuple(spans)


def _probed(template: ChatTemplate) -> _Ending:
    try:
        prompt = template.render([QUESTION], prompt=True)
        wholes = [template.render([QUESTION, {"role": "assistant", "content": answer}]) for answer in ANSWERS]
        bare = template.render([QUESTION])
    except RecordError as error:
        raise ConfigError(f"data.chat_template: {error}") from None
    fitting = [whole for whole in wholes if whole.startswith(prompt) and PROBE in whole[len(prompt) :]]
    if not fitting:
        raise _unusable(template, f"its prompt for an answer, {prompt[-40:]!r}, is no beginning of an answer it writes")
    heading, _, ending = fitting[0][len(prompt) :].partition(PROBE)
    if prompt == bare and heading.strip():
        raise _unusable(template, f"it ignores add_generation_prompt and begins an answer with {heading!r}")
    if not ending:
        raise _unusable(template, "it marks no end of an answer, so a model would not learn to stop")
    return _ending_of(template, fitting[0], ending)


def _ending_of(template: ChatTemplate, whole: str, ending: str) -> _Ending:
    """Split the text after an answer. Phi-3's template closes with eos_token, but not before another answer."""
    eos = template.variables.get("eos_token", "")
    closing = eos if ending != eos and _closes(template, whole, eos) else ""
    body = ending.removesuffix(closing)
    mark = body.rstrip()
    return _Ending(body[len(mark) :] if mark else "", closing)


def _closes(template: ChatTemplate, whole: str, eos: str) -> bool:
    try:
        asked_again = template.render([QUESTION, {"role": "assistant", "content": ANSWERS[0]}], prompt=True)
    except RecordError:
        return False
    return not asked_again.startswith(whole) and asked_again.startswith(whole.removesuffix(eos))


def _unusable(template: ChatTemplate, problem: str) -> ConfigError:
    return ConfigError(
        f"data.chat_template: {template.name} cannot tell what the assistant wrote: {problem}; give a template with "
        "{% generation %} tags around it in data.chat_template"
    )
