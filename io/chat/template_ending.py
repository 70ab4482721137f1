"""Finds out how a chat template begins and ends an answer, by rendering a question and an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import ChatTemplate, Message
from megatrain_ray.io.chat.messages import PROBE
from megatrain_ray.io.records.read_records import RecordError

QUESTION: Message = {"role": "user", "content": "Question"}
CALL = {"type": "function", "function": {"name": PROBE, "arguments": {}}}
# The mark that begins a turn, such as <|user|>.
_MARK = re.compile(r"\s*(?P<mark><[^<>\s]+>|\[[^\[\]\s]+\])")
ANSWERS = (PROBE, f"<think>\nthought\n</think>\n\n{PROBE}")  # some templates open a thought in the prompt and keep it


@dataclass(frozen=True)
class Surroundings:
    """Describes what a template writes around an answer: the end mark (`<|im_end|>`), then `blanks`, then `closing`.

    GLM's templates write no mark after an answer: the model ends it by beginning the next turn, `<|user|>`, or
    `<|observation|>` after a call. These are then `user_mark` and `tool_mark`; both are empty for other templates.
    """

    heading: str  # what asks for an answer after a question, such as "<|im_start|>assistant\n"; may be empty
    blanks: str  # whitespace after the mark that the model need not generate
    closing: str  # eos token that closes the whole conversation; may be empty
    user_mark: str = ""
    tool_mark: str = ""

    def ended(self, text: str, answer: Message) -> str:
        """Return a conversation that ends with an answer, with the mark that begins the next turn if that ends it."""
        return text + (self.tool_mark if answer.get("tool_calls") else self.user_mark)

    def cut(self, text: str) -> str:
        """Return the text up to the end mark."""
        return text.removesuffix(self.closing).removesuffix(self.blanks)


def find_surroundings(template: ChatTemplate) -> Surroundings:
    """Return what the template writes around an answer.

    Raises ConfigError, naming the template, if it refuses the question, if the text it renders for an answer does not
    begin with its prompt, if it ignores the prompt setting and writes the heading as part of the answer, or if it marks
    no end of an answer.
    """
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
        return _without_mark(template, heading_of(prompt, bare))
    return _split_ending(template, heading_of(prompt, bare), fitting[0], ending)


def heading_of(prompt: str, bare: str) -> str:
    return prompt.removeprefix(bare) if prompt.startswith(bare) else ""


def _without_mark(template: ChatTemplate, heading: str) -> Surroundings:
    """Return the surroundings of a template that writes nothing after an answer. Raises ConfigError as above."""
    called: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    if not (mark := user_mark(template)):
        raise _unusable(template, "it marks no end of an answer, so a model would not learn to stop")
    tool_mark = _mark_between(template, called, {"role": "tool", "content": PROBE})
    return Surroundings(heading, "", "", mark, tool_mark or mark)


def user_mark(template: ChatTemplate) -> str:
    """Return the mark that begins the user's turn after an answer; empty if there is none."""
    return _mark_between(template, {"role": "assistant", "content": PROBE}, QUESTION)


def _mark_between(template: ChatTemplate, answer: Message, following: Message) -> str:
    """Return the mark that begins the turn after an answer; empty if there is none."""
    try:
        answered = template.render([QUESTION, answer])
        followed = template.render([QUESTION, answer, following])
    except RecordError:
        return ""
    found = _MARK.match(followed.removeprefix(answered)) if followed.startswith(answered) else None
    return found["mark"] if found else ""


def _split_ending(template: ChatTemplate, heading: str, whole: str, ending: str) -> Surroundings:
    """Split the text after an answer. Phi-3's template closes with eos_token, but not before another answer."""
    eos = template.variables.get("eos_token", "")
    closing = eos if ending != eos and _closes(template, whole, eos) else ""
    body = ending.removesuffix(closing)
    mark = body.rstrip()
    return Surroundings(heading, body[len(mark) :] if mark else "", closing)


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
