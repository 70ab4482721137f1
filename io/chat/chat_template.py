"""Renders conversations as Transformers does, by a template: a tokenizer's own, a named one, a file, or a plain one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.messages import PROBE
from megatrain_ray.io.images.image_parts import IMAGE
from megatrain_ray.io.images.image_processor import holds_processor
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.byte_tokenizer import END_NAME
from megatrain_ray.io.tokens.tokenizer import (
    ADDITIONAL_TEMPLATES,
    FolderTokenizer,
    named_tokens,
    read_settings,
    tokenizer_folder,
)
from megatrain_ray.read_file import regular_file
from megatrain_ray.time_limit import OutOfTimeError, time_limit

Message = Mapping[str, Any]

TEMPLATE_NAME = "chat_template.jinja"  # file of a folder from which Transformers reads the template
PROCESSOR_TEMPLATE_NAME = "chat_template.json"  # file that older processors have it in

# Templates by name, for tokenizers that have none.
TEMPLATES = Path(__file__).parent / "templates"
PLAIN = "plain"  # what is used if there is nothing else
EOS = "eos_token"  # stands for the tokenizer's own
MARKS: dict[str, tuple[str, ...]] = {  # tokens that a template writes around turns
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": (EOS,),
}

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
FALLBACK = "the plain template"  # origin of the one that stands in for a template that is nowhere
RENDER_S = 30.0  # a conversation takes milliseconds
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern that Transformers uses


class TemplateRefusalError(RecordError):
    """Gives the reason that a template itself raises."""


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
    in_parts: bool = False  # whether it gets texts as lists of parts, with an image in place of each IMAGE

    def settings(self) -> dict[str, Any]:
        """Return what decides the texts that it renders, as data for JSON."""
        parts = ["parts"] if self.in_parts else []
        return {"template": [self.source, self.tool_use, dict(self.variables), *parts]}

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = False) -> str:
        """Return the rendered text. Raises TemplateRefusalError if it refuses the messages.

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
            with time_limit(RENDER_S):
                texts, places = render_jinja_template(
                    conversations=[list(map(_in_parts, messages) if self.in_parts else messages)],
                    tools=list(tools) or None,
                    chat_template=_with_fixed_date(self._source(tools)),
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **self.variables,
                )
        except OutOfTimeError:
            raise ConfigError(
                f"data.chat_template: {self.name} did not render a conversation of {len(messages)} turns within "
                f"{RENDER_S:.0f} s; mend its loops, or name another template"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"data.chat_template: {self.name}: line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateRefusalError(f"the chat template ({self.name}) refuses it: {error}") from None
        return texts[0], places[0] if marked else []


def _in_parts(message: Message) -> Message:
    """Return a message with its content as a list of parts. One without content stays so."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    first, *others = ([{"type": "text", "text": text}] if text else [] for text in content.split(IMAGE))
    parts: list[dict[str, str]] = [*first, *(part for other in others for part in ({"type": "image"}, *other))]
    return {**message, "content": parts or [{"type": "text", "text": ""}]}


def load_chat_template(
    tokenizer: str, name: str | None = None, arguments: Mapping[str, Any] | None = None, *, ends_bytes: bool = False
) -> ChatTemplate:
    """Return the template that `name` means, else that of the tokenizer's folder, else the plain one.

    name: an additional template of the tokenizer's folder, one of the named templates, or a file.
    arguments: variables of the template, such as enable_thinking.
    ends_bytes: give the template an eos_token if the tokenizer is `bytes`, as an export of that has.

    Raises ConfigError for broken files, for a named template whose marks the tokenizer lacks, for arguments that a user
    may not set, and as find_on_hub.
    """
    if own := OWN_VARIABLES & (arguments or {}).keys():
        raise ConfigError(
            f"data.chat_template_args: {min(own)} is what the program gives a template itself; expected a variable of "
            "your template, such as enable_thinking"
        )
    folder = None if tokenizer == "bytes" else tokenizer_folder(tokenizer)
    named = named_tokens(folder) if folder else {"eos_token": END_NAME} if ends_bytes else {}
    variables = {**named, **(arguments or {})}
    template = _chosen(name, folder, variables)
    return _in_its_form(template) if folder and holds_processor(folder) else template


def _chosen(name: str | None, folder: Path | None, variables: Mapping[str, Any]) -> ChatTemplate:
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
    return ChatTemplate(FALLBACK, read_named_template(PLAIN), variables=variables)


def _in_its_form(template: ChatTemplate) -> ChatTemplate:
    """Return a template that gets lists of parts if it writes no other texts, as those of some models with images."""
    in_parts = replace(template, in_parts=True)
    return in_parts if not _writes_texts(template) and _writes_texts(in_parts) else template


def _writes_texts(template: ChatTemplate) -> bool:
    try:
        return PROBE in template.render([{"role": "user", "content": PROBE}])
    except TemplateRefusalError:
        return False


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


def read_named_template(name: str) -> str:
    """Return the source of `PLAIN` or of one of `MARKS`."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def fitting_templates(folder: Path | None) -> list[str]:
    """Return the names of the templates whose marks a tokenizer has. `folder` is as in check_marks."""
    return [name for name, marks in MARKS.items() if not _missing(marks, folder)]


def check_marks(name: str, folder: Path | None) -> None:
    """Raise ConfigError if a tokenizer lacks marks of a template: they would be learned in pieces, and never end.

    folder: the tokenizer's; None: the tokenizer `bytes`, which has no marks.
    """
    missing = _missing(MARKS[name], folder)
    if missing:
        fitting = fitting_templates(folder)
        others = f"set data.chat_template to {' or '.join(fitting)}" if fitting else "leave data.chat_template out"
        raise ConfigError(
            f"data.chat_template: {name} writes {', '.join(missing)}, which {folder or 'the tokenizer bytes'} does not "
            f"have as one token; {others}, or add the tokens to tokenizer and model with Transformers "
            "(add_special_tokens, resize_token_embeddings)"
        )


def _missing(marks: Sequence[str], folder: Path | None) -> list[str]:
    if folder is None:
        return list(marks)
    tokenizer, names = FolderTokenizer(folder), named_tokens(folder)
    ids = {mark: tokenizer.id_of(names.get(EOS, "") if mark == EOS else mark) for mark in marks}
    return [mark for mark, token_id in ids.items() if token_id is None]


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
        return regular_file(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: cannot read {file}: {error}") from None


def _with_fixed_date(source: str) -> str:
    """Define the template's strftime_now function, in a line that is trimmed, so that it returns the fixed date."""
    if "strftime_now" not in source:
        return source
    filters = " | ".join(f"replace({code!r}, {text!r})" for code, text in FIXED_DATE.items())
    return f"{{%- macro strftime_now(format) -%}}{{{{- format | {filters} -}}}}{{%- endmacro %}}\n{source}"
