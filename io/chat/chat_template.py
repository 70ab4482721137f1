"""Chat templates: a tokenizer's own, a file, or a plain default, rendered as Transformers renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import tokenizer_folder

Message = Mapping[str, Any]

TEMPLATE_NAME = "chat_template.jinja"  # where Transformers looks for it in a folder

# For bytes and for tokenizers without a template: ChatML in plain text. An answer ends with the tokenizer's own end of
# text where it has one, so that whatever serves the model stops there.
PLAIN_TEMPLATE = """\
{%- if tools or messages | selectattr('tool_calls', 'defined') | list -%}
    {{- raise_exception('the plain template has no tools: give data.chat_template') -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content -}}
    {{- eos_token if eos_token and message.role == 'assistant' else '<|im_end|>' }}
{% endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# A template that writes today's date would make other tokens every day, and a run could not be resumed on the next.
# 26 July 2024 is what Llama's templates write where they cannot ask for the date.
FIXED_DATE = {
    "%d": "26", "%m": "07", "%Y": "2024", "%y": "24", "%b": "Jul", "%B": "July", "%a": "Fri", "%A": "Friday",
    "%H": "12", "%I": "12", "%M": "00", "%S": "00", "%p": "PM", "%j": "208", "%-d": "26", "%-m": "7",
}  # fmt: skip
# What render_jinja_template and its template get from here.
OWN_VARIABLES = {
    "conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
    "continue_final_message", "add_generation_prompt",
}  # fmt: skip
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as Transformers looks for it


@dataclass(frozen=True)
class ChatTemplate:
    """Turns messages into text. `tool_use`: the template for conversations with tools, where there is one."""

    name: str  # where it is from, for errors
    source: str
    tool_use: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # bos_token and the like, and data.chat_template_args
    is_own: bool = False  # of the tokenizer's folder

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = False) -> str:
        """The text; `prompt`: with what makes the model answer next. Raises RecordError with the template's reason."""
        return self._render(messages, tools, prompt=prompt, marked=False)[0]

    def render_marked(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the places [start, end) of what the {% generation %} tags enclose. Raises RecordError."""
        return self._render(messages, tools, prompt=False, marked=True)

    def marks_generation(self, tools: Sequence[Message]) -> bool:
        """Whether the template itself says what is learned."""
        return GENERATION_TAG.search(self._source(tools)) is not None

    def _source(self, tools: Sequence[Message]) -> str:
        return self.tool_use if tools and self.tool_use is not None else self.source

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message], *, prompt: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template  # a second, only where chats are read

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
        except Exception as error:  # a template is a program; what it stumbles over shows in many kinds
            raise RecordError(f"the chat template ({self.name}) refuses it: {error}") from None
        return texts[0], places[0] if marked else []


def load_chat_template(
    tokenizer: str, file: str | None = None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template of `data.chat_template`, else of the tokenizer's folder, else the plain one.

    `arguments`: variables of the template, such as enable_thinking. Raises ConfigError for files that are broken, for
    arguments that are not the user's to give, and as find_on_hub.
    """
    if own := OWN_VARIABLES & (arguments or {}).keys():
        raise ConfigError(
            f"data.chat_template_args: {min(own)} is what the program gives a template itself; expected a variable of "
            "your template, such as enable_thinking"
        )
    folder = None if tokenizer == "bytes" else tokenizer_folder(tokenizer)
    variables = {**(special_tokens(folder) if folder else {}), **(arguments or {})}
    if file is not None:
        return ChatTemplate(file, _read(Path(file)), variables=variables)
    sources = _sources(folder) if folder else {}
    if not sources:
        return ChatTemplate("the plain template", PLAIN_TEMPLATE, variables=variables)
    if "default" not in sources:
        names = ", ".join(sources)
        raise ConfigError(f"data.chat_template: {folder} holds {names} but no default; name the file to use")
    return ChatTemplate(f"of {folder}", sources["default"], sources.get("tool_use"), variables, is_own=True)


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and whatever else the folder's settings name so, as texts."""
    settings = {**_settings(folder / "special_tokens_map.json"), **_settings(folder / "tokenizer_config.json")}
    tokens = {key: value for key, value in settings.items() if key.endswith("_token") and value}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _sources(folder: Path) -> dict[str, str]:
    """Templates by name, those in files of their own before those in tokenizer_config.json, as Transformers has it."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (own := folder / TEMPLATE_NAME).is_file():
        files["default"] = own
    if files:
        return {name: _read(path) for name, path in files.items()}
    config = folder / "tokenizer_config.json"
    match _settings(config).get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*named] if all(isinstance(n, dict) and {"name", "template"} <= n.keys() for n in named):
            return {item["name"]: item["template"] for item in named}
    raise ConfigError(f"data.chat_template: {config}: expected a text, or a list of name and template")


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"data.tokenizer: {file} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"data.tokenizer: {file}: expected a mapping")
    return settings


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: cannot read {file}: {error}") from None


def _with_fixed_date(source: str) -> str:
    """The line end after the macro belongs to its last tag, so the template itself starts on a fresh line."""
    if "strftime_now" not in source:
        return source
    filters = " | ".join(f"replace({code!r}, {text!r})" for code, text in FIXED_DATE.items())
    return f"{{%- macro strftime_now(format) -%}}{{{{- format | {filters} -}}}}{{%- endmacro %}}\n{source}"
