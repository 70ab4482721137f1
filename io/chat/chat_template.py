"""Renders conversations as Transformers does, and finds in the text what the model must generate.

A chat template is a tokenizer's own, a named one, a file, or a plain default. What the model generates is each
assistant turn and its end mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.conversation_formats import Conversation
from megatrain_ray.io.chat.named_templates import MARKS, PLAIN, check_marks, read_named_template
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import ADDITIONAL_TEMPLATES, named_tokens, read_settings, tokenizer_folder

Message = Mapping[str, Any]

TEMPLATE_NAME = "chat_template.jinja"  # file of a folder from which Transformers reads the template
PROCESSOR_TEMPLATE_NAME = "chat_template.json"  # file that older processors have it in

# A template that writes today's date would give different tokens every day, and a run could not be resumed a day later.
# Llama's templates write 26 July 2024 if they have no function for the date.
FIXED_DATE = {
    "%d": "26", "%m": "07", "%Y": "2024", "%y": "24", "%b": "Jul", "%B": "July", "%a": "Fri", "%A": "Friday",
    "%H": "12", "%I": "12", "%M": "00", "%S": "00", "%p": "PM", "%j": "208", "%-d": "26", "%-m": "7",
}  # fmt: skip
# Arguments of render_jinja_template and variables of a template that this module sets itself.
OWN_VARIABLES = {
    "conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
    "continue_final_message", "add_generation_prompt",
}  # fmt: skip
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern that Transformers uses

# Messages by which a template is asked how it writes an answer.
PROBE = "m3gaprobe"  # text that no template contains
QUESTION: Message = {"role": "user", "content": "Question"}
ANSWERS = (PROBE, f"<think>\nthought\n</think>\n\n{PROBE}")  # some templates open a thought in the prompt and keep it


@dataclass(frozen=True)
class ChatTemplate:
    """Renders messages as text.

    tool_use: the template for conversations with tools; None: `source` is used for them too.
    """

    name: str  # origin of the template, for messages
    source: str
    tool_use: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # bos_token and the like, and data.chat_template_args
    is_own: bool = False  # whether it is from the tokenizer's folder

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = False) -> str:
        """Return the rendered text. Raises RecordError with the template's reason if it refuses the messages.

        prompt: whether to append the text that makes the model answer next.
        """
        return self._render(messages, tools, prompt=prompt, marked=False)[0]

    def render_marked(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the character ranges in {% generation %} tags. Raises RecordError as `render`."""
        return self._render(messages, tools, prompt=False, marked=True)

    def marks_generation(self, tools: Sequence[Message]) -> bool:
        """Return whether the template marks the supervised text itself, with {% generation %} tags."""
        return GENERATION_TAG.search(self._source(tools)) is not None

    def _source(self, tools: Sequence[Message]) -> str:
        return self.tool_use if tools and self.tool_use is not None else self.source

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message], *, prompt: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template  # takes 1 s: only if chats are read

        try:
            texts, places = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=_with_fixed_date(self._source(tools)),
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"data.chat_template: {self.name}: line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template is a program and may raise anything
            raise RecordError(f"the chat template ({self.name}) refuses it: {error}") from None
        return texts[0], places[0] if marked else []


def load_chat_template(
    tokenizer: str, name: str | None = None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Return the template that `name` means, else that of the tokenizer's folder, else the plain one.

    name: an additional template of the tokenizer's folder, one of the named templates, or a file.
    arguments: variables of the template, such as enable_thinking.

    Raises ConfigError for broken files, for a named template whose marks the tokenizer lacks, for arguments that a user
    may not set, and as find_on_hub.
    """
    if own := OWN_VARIABLES & (arguments or {}).keys():
        raise ConfigError(
            f"data.chat_template_args: {min(own)} is what the program gives a template itself; expected a variable of "
            "your template, such as enable_thinking"
        )
    folder = None if tokenizer == "bytes" else tokenizer_folder(tokenizer)
    variables = {**(named_tokens(folder) if folder else {}), **(arguments or {})}
    sources = _sources(folder) if folder else {}
    if name is not None:
        return ChatTemplate(name, sources.get(name) or _named(name, folder), variables=variables)
    if "default" in sources:
        return ChatTemplate(f"of {folder}", sources["default"], sources.get("tool_use"), variables, is_own=True)
    if sources:
        names = ", ".join(sources)
        raise ConfigError(f"data.chat_template: {folder} holds {names} but no default; name the one to use")
    if folder and (source := _of_processor(folder)) is not None:
        return ChatTemplate(f"of {folder / PROCESSOR_TEMPLATE_NAME}", source, variables=variables)
    return ChatTemplate("the plain template", read_named_template(PLAIN), variables=variables)


def _named(name: str, folder: Path | None) -> str:
    if name in MARKS:
        check_marks(name, folder)
        return read_named_template(name)
    if not Path(name).exists():
        raise ConfigError(
            f"data.chat_template: no such file: {name} (relative paths start at {Path.cwd()}); expected a Jinja file, "
            f"or one of {', '.join(MARKS)}"
        )
    return _read(Path(name))


def _of_processor(folder: Path) -> str | None:
    """Return the template that older processors have in a file of their own, which tokenizers do not read."""
    source = read_settings(folder / PROCESSOR_TEMPLATE_NAME).get("chat_template")
    return source if isinstance(source, str) else None


def _sources(folder: Path) -> dict[str, str]:
    """Return the folder's templates by name. As in Transformers, files override tokenizer_config.json."""
    files = {path.stem: path for path in sorted(folder.glob(f"{ADDITIONAL_TEMPLATES}/*.jinja"))}
    if (own := folder / TEMPLATE_NAME).is_file():
        files["default"] = own
    if files:
        return {name: _read(path) for name, path in files.items()}
    config = folder / "tokenizer_config.json"
    match read_settings(config).get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*named] if all(isinstance(n, dict) and {"name", "template"} <= n.keys() for n in named):
            return {item["name"]: item["template"] for item in named}
    raise ConfigError(f"data.chat_template: {config}: expected a text, or a list of name and template")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: cannot read {file}: {error}") from None


def _with_fixed_date(source: str) -> str:
    """Define the template's strftime_now function, in a line that is trimmed, so that it returns the fixed date."""
    if "strftime_now" not in source:
        return source
    filters = " | ".join(f"replace({code!r}, {text!r})" for code, text in FIXED_DATE.items())
    return f"{{%- macro strftime_now(format) -%}}{{{{- format | {filters} -}}}}{{%- endmacro %}}\n{source}"


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
        self._ending = _Ending("", "") if template.marks_generation(()) else _find_ending(template)

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
            return [MarkedText(text, _join_touching(places))]
        return _merge_turns([self._turn(messages[: i + 1], tools) for i in answers])

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


def _merge_turns(turns: Sequence[_Turn]) -> list[MarkedText]:
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


def _join_touching(places: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that touch: tags may enclose the thought, content and end mark of one answer separately."""
    spans: list[tuple[int, int]] = []
    for start, end in places:
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return tuple(spans)


def _find_ending(template: ChatTemplate) -> _Ending:
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
    return _split_ending(template, fitting[0], ending)


def _split_ending(template: ChatTemplate, whole: str, ending: str) -> _Ending:
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
