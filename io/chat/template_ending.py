"""Finds out how a chat template begins and ends an answer, and the tokens after which an answer is over.

It renders a question and an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import ChatTemplate, Message, load_chat_template
from megatrain_ray.io.chat.messages import PROBE, without_opened_thought
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, Tokenizer, named_tokens

Tools = Sequence[Message]

QUESTION: Message = {"role": "user", "content": "Question"}
CALL = {"type": "function", "function": {"name": PROBE, "arguments": {}}}
# The mark that begins a turn, such as <|user|>.
_MARK = re.compile(r"\s*(?P<mark><[^<>\s]+>|\[[^\[\]\s]+\])")
ANSWERS = (PROBE, f"<think>\nthought\n</think>\n\n{PROBE}")  # some templates open a thought in the prompt and keep it
_ANSWER = "zqx"  # occurs in no template
_MESSAGES = ({"role": "user", "content": "What?"}, {"role": "assistant", "content": _ANSWER})


@dataclass(frozen=True)
class Surroundings:
    """Describes what a template writes around an answer: the end mark (`<|im_end|>`), then `blanks`, then `closing`.

    GLM's templates write no mark after an answer: the model ends it by beginning the next turn, `<|user|>`, or
    `<|observation|>` after a call. These are then `user_mark` and `tool_mark`; both are empty for other templates.

    mark: the end mark that the template writes itself; empty for GLM's.
    """

    heading: str  # what asks for an answer after a question, such as "<|im_start|>assistant\n"; may be empty
    blanks: str  # whitespace after the mark that the model need not generate
    closing: str  # eos token that closes the whole conversation; may be empty
    user_mark: str = ""
    tool_mark: str = ""
    mark: str = ""

    def ended(self, text: str, answer: Message) -> str:
        """Return a conversation that ends with an answer, with the mark that begins the next turn if that ends it."""
        if self.user_mark and text.endswith(self.user_mark):  # Hunyuan 3 writes it after calls
            return text
        return text + (self.tool_mark if answer.get("tool_calls") else self.user_mark)

    def cut(self, text: str) -> str:
        """Return the text up to the end mark."""
        return text.removesuffix(self.closing).removesuffix(self.blanks)


def find_surroundings(template: ChatTemplate, tools: Tools = ()) -> Surroundings:
    """Return what the template writes around an answer.

    tools: of a conversation, for which a folder may have another template.

    Raises ConfigError, naming the template, if it refuses the question, if the text it renders for an answer does not
    begin with its prompt, if it ignores the prompt setting and writes the heading as part of the answer, or if it marks
    no end of an answer.
    """
    try:
        prompt = template.render([QUESTION], tools, prompt=True)
        wholes = [template.render([QUESTION, {"role": "assistant", "content": answer}], tools) for answer in ANSWERS]
        bare = template.render([QUESTION], tools)
    except RecordError as error:
        raise ConfigError(f"data.chat_template: {error}") from None
    fitting = [
        (whole, start)
        for start in (prompt, without_opened_thought(prompt))
        for whole in wholes
        if whole.startswith(start) and PROBE in whole[len(start) :]
    ]
    if not fitting:
        raise _unusable(template, f"its prompt for an answer, {prompt[-40:]!r}, is no beginning of an answer it writes")
    whole, start = fitting[0]
    heading, _, ending = whole[len(start) :].partition(PROBE)
    asks_always = _what_asks(template, tools, bare, ending) if prompt.startswith(bare) else ""
    if prompt == bare and heading.strip() and not asks_always:
        raise _unusable(template, f"it ignores add_generation_prompt and begins an answer with {heading!r}")
    if not ending or (ending.isspace() and user_mark(template, tools)):
        return _without_mark(template, tools, heading_of(prompt, bare))
    if asks_always:
        return Surroundings(asks_always + prompt.removeprefix(bare), "", asks_always)
    return _split_ending(template, tools, heading_of(prompt, bare), whole, ending)


def _what_asks(template: ChatTemplate, tools: Tools, bare: str, ending: str) -> str:
    """Return what asks for the next answer after `ending`, as Command R's templates do always; empty if nothing does.

    An answer then ends with the eos token, or with the first mark if the template does not write the eos token.
    """
    eos, first = template.variables.get("eos_token") or "\0", _MARK.match(ending)
    asking = ending.partition(eos)[2] if eos in ending else ending[first.end() :] if first else ""
    if not asking.strip() or not bare.endswith(asking):
        return ""
    try:
        followed = template.render([QUESTION, {"role": "assistant", "content": PROBE}, QUESTION], tools)
    except RecordError:
        return asking
    # What stands before a question, too, asks for nothing.
    return "" if followed.rpartition(PROBE)[2].startswith(ending) else asking


def heading_of(prompt: str, bare: str) -> str:
    return prompt.removeprefix(bare) if prompt.startswith(bare) else ""


def _without_mark(template: ChatTemplate, tools: Tools, heading: str) -> Surroundings:
    """Return the surroundings of a template that writes nothing after an answer. Raises ConfigError as above."""
    called: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    if not (mark := user_mark(template, tools)):
        raise _unusable(template, "it marks no end of an answer, so a model would not learn to stop")
    tool_mark = _mark_between(template, tools, called, {"role": "tool", "content": PROBE})
    return Surroundings(heading, "", "", mark, mark if tool_mark is None else tool_mark)


def user_mark(template: ChatTemplate, tools: Tools = ()) -> str:
    """Return the mark that begins the user's turn after an answer; empty if there is none."""
    return _mark_between(template, tools, {"role": "assistant", "content": PROBE}, QUESTION) or ""


def _mark_between(template: ChatTemplate, tools: Tools, answer: Message, following: Message) -> str | None:
    """Return the mark that begins the turn after an answer; empty if none does; None if it cannot be found out.

    Apertus writes the result of a tool directly after the call, within the same turn.
    """
    try:
        answered = template.render([QUESTION, answer], tools)
        followed = template.render([QUESTION, answer, following], tools)
    except RecordError:
        return None
    if not followed.startswith(answered) and answer["content"]:  # GLM 5.1 writes no empty thought then
        answered = followed[: followed.find(PROBE) + len(PROBE)]
    if not followed.startswith(answered):
        return None
    found = _MARK.match(followed.removeprefix(answered))
    return found["mark"] if found and PROBE not in found["mark"] else ""


def _split_ending(template: ChatTemplate, tools: Tools, heading: str, whole: str, ending: str) -> Surroundings:
    """Split the text after an answer into its mark, blanks, and marks that are not written before another question."""
    closing = _closing(template, tools, whole, ending)
    body = ending.removesuffix(closing)
    mark = body.rstrip()
    return Surroundings(heading, body[len(mark) :] if mark else "", closing, mark=mark)


def _closing(template: ChatTemplate, tools: Tools, whole: str, ending: str) -> str:
    """Return the marks that close a whole conversation: Phi-3 has its eos token there, Hunyuan another mark."""
    try:
        asked_again = template.render([QUESTION, {"role": "assistant", "content": ANSWERS[0]}], tools, prompt=True)
    except RecordError:
        return ""
    closings = [ending[found.start("mark") :] for found in _MARK.finditer(ending)]
    return next((end for end in ["", *closings[:0:-1]] if asked_again.startswith(whole.removesuffix(end))), "")


def _unusable(template: ChatTemplate, problem: str) -> ConfigError:
    return ConfigError(
        f"data.chat_template: {template.name} cannot tell what the assistant wrote: {problem}; give a template with "
        "{% generation %} tags around it in data.chat_template"
    )


class EndMarks(NamedTuple):
    """Holds the ids at which generation stops, and those that may be among them.

    ends: the last mark that the chat template writes after an answer, then the tokenizer's eos token, as far as
        they exist, each once.
    pad: the tokenizer's pad token, else its eos token; None: it names neither.
    marks: all tokens that are no pieces of text.
    text: what the template writes after an answer, if it has no mark for it; empty otherwise.
    """

    ends: tuple[int, ...]
    pad: int | None
    marks: frozenset[int]
    text: str = ""


def find_end_marks(folder: Path, *, chats: bool) -> EndMarks:
    """Return the end marks of a tokenizer's folder.

    chats: whether the model learned chats, in the folder's template or the plain one.

    Raises ConfigError for broken files.
    """
    tokenizer, names = FolderTokenizer(folder), named_tokens(folder)
    eos = tokenizer.end_of_document
    after = text_after_answer(load_chat_template(str(folder))) if chats else ""
    turn = last_mark(tokenizer, after)
    pad = tokenizer.id_of(names["pad_token"]) if "pad_token" in names else eos
    ends = tuple(dict.fromkeys(end for end in (turn, eos) if end is not None))
    return EndMarks(ends, pad, tokenizer.mark_ids, "" if turn is not None else after.strip())


def text_after_answer(template: ChatTemplate) -> str:
    """Return what ends an answer: what a template writes after it and is learned, or the mark that begins a question.

    Empty if the template refuses an answer.
    """
    whole = _answered(template)
    try:
        around = find_surroundings(template)
        whole = around.cut(around.ended(whole, _MESSAGES[-1]))
    except ConfigError:  # with {% generation %} tags such a template may do
        pass
    after = whole.rpartition(_ANSWER)[2]
    if not after.strip():
        return user_mark(template)
    tagged = _tagged_after_answer(template)  # may go on to what closes a conversation, or end before the template does
    return tagged if tagged and not tagged.startswith(after.strip()) else after


def _tagged_after_answer(template: ChatTemplate) -> str:
    """Return what stands after an answer within {% generation %} tags; empty if there is none."""
    if not template.marks_generation(()):
        return ""
    try:
        text, places = template.render_marked(_MESSAGES, ())
    except RecordError:
        return ""
    answered = text.rfind(_ANSWER) + len(_ANSWER)
    return "".join(text[max(start, answered) : end] for start, end in places).strip()


def unlearned_mark(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """Return the id of the mark after an answer that {% generation %} tags leave out; None if they leave out none."""
    if not template.marks_generation(()) or _tagged_after_answer(template):
        return None
    return last_mark(tokenizer, text_after_answer(template))


def lacks_bos(tokenizer: Tokenizer, template: ChatTemplate) -> bool:
    """Return whether Transformers begins a text with a bos token that a chat in this template does not begin with."""
    text = _answered(template)
    return bool(text) and tokenizer.adds_bos and tokenizer.encode(text)[:1].tolist() != [tokenizer.bos]


def _answered(template: ChatTemplate) -> str:
    try:
        return template.render(_MESSAGES)
    except RecordError:
        return ""


def last_mark(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the last mark in what ends an answer; None if all of it is ordinary text.

    Generation stops by itself at a mark, but not at ordinary text. Marks before the last one may occur within an
    answer: Kimi K3 closes its thought as it closes the answer.
    """
    return next((token for token in tokenizer.encode(text).tolist()[::-1] if token in tokenizer.mark_ids), None)
