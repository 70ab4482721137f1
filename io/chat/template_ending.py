"""Finds out how a chat template begins and ends an answer, by rendering a question and an answer."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import ChatTemplate, Message
from megatrain_ray.io.chat.messages import PROBE
from megatrain_ray.io.records.read_records import RecordError

QUESTION: Message = {"role": "user", "content": "Question"}
ANSWERS = (PROBE, f"<think>\nthought\n</think>\n\n{PROBE}")  # some templates open a thought in the prompt and keep it


@dataclass(frozen=True)
class Surroundings:
    """Describes what a template writes around an answer: the end mark (`<|im_end|>`), then `blanks`, then `closing`."""

    heading: str  # what asks for an answer after a question, such as "<|im_start|>assistant\n"; may be empty
    blanks: str  # whitespace after the mark that the model need not generate
    closing: str  # eos token that closes the whole conversation; may be empty

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
        raise _unusable(template, "it marks no end of an answer, so a model would not learn to stop")
    return _split_ending(template, prompt.removeprefix(bare) if prompt.startswith(bare) else "", fitting[0], ending)


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
