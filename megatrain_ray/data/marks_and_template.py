"""Decides by which marks texts begin and end and by which template chats are written, and warns of what is amiss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.io.chat.chat_template import ChatTemplate, fitting_templates, load_chat_template
from megatrain_ray.io.chat.encode_chats import with_ends_of
from megatrain_ray.io.chat.template_ending import lacks_bos, last_mark, text_after_answer, unlearned_mark
from megatrain_ray.io.tokens.byte_tokenizer import ByteTokenizer, is_byte_tokenizer
from megatrain_ray.io.tokens.tokenizer import (
    FolderTokenizer,
    Tokenizer,
    holds_tokenizer,
    load_tokenizer,
    tokenizer_folder,
)

ALL_IDS = 1 << 32  # more than any id of a token


def decide_marks(config: TrainConfig, vocab_size: int | None) -> TrainConfig:
    """Return the configuration with data.add_bos and data.add_eos decided, and print which of them is added.

    vocab_size: of the model; None: not known yet.
    """
    if not open_marks(config.data, config.tokenizer):
        return config
    tokenizer = load_tokenizer(config.tokenizer)
    data = with_marks(config.data, config.tokenizer, vocab_size or ALL_IDS, tokenizer)
    if isinstance(tokenizer, FolderTokenizer):
        if data.add_bos and config.data.add_bos is None and tokenizer.bos is not None:
            say(f"each text begins with {tokenizer.token_of(tokenizer.bos)}, as in Transformers (data.add_bos)")
        if data.add_eos and config.data.add_eos is None and tokenizer.end_of_document is not None:
            say(f"each text ends with {tokenizer.token_of(tokenizer.end_of_document)} (data.add_eos)")
    return config.model_copy(update={"data": data})


def open_marks(data: DataConfig, tokenizer: str) -> tuple[str, ...]:
    """Return which of the keys add_bos and add_eos the start of a run must still decide."""
    return tuple(key for key in data.decided_marks(tokenizer) if getattr(data, key) is None)


def with_marks(data: DataConfig, name: str, vocab_size: int, tokenizer: Tokenizer | None = None) -> DataConfig:
    """Return the data with add_bos and add_eos decided where they are left open.

    tokenizer: that of the `name`; None: it is loaded if it is needed.
    """
    if not (keys := open_marks(data, name)):
        return data
    tokenizer = tokenizer or load_tokenizer(name)
    end, packs_texts = tokenizer.end_of_document, data.kind == "pretrain" and data.packing
    decided = {"add_bos": tokenizer.adds_bos, "add_eos": end is not None and end < vocab_size and not packs_texts}
    return data.model_copy(update={key: decided[key] for key in keys})


def other_tokenizer(config: TrainConfig) -> str | None:
    """Return a warning if the model's local folder has another tokenizer than data.tokenizer; else None."""
    used, folder = config.data.tokenizer, Path(config.model.path or "")
    if used is None or config.model.path is None or not holds_tokenizer(folder):
        return None
    if is_byte_tokenizer(folder) if used == "bytes" else _is_same(folder, tokenizer_folder(used)):
        return None
    return (
        f"warning: data.tokenizer: {used} is not the tokenizer in {folder}, whose ids the model was trained on; leave "
        "data.tokenizer out to use that"
    )


def _is_same(folder: Path, other: Path) -> bool:
    """Return whether two folders hold the same tokenizer.json, or are the same."""
    files = (at / "tokenizer.json" for at in (folder, other))
    own, given = (path.read_bytes() if path.is_file() else b"" for path in files)
    return own == given or folder.resolve() == other.resolve()


def template_of(data: DataConfig, tokenizer: str) -> ChatTemplate:
    """Return the chat template of the data. Raises ConfigError as load_chat_template."""
    template = load_chat_template(tokenizer, data.chat_template, data.chat_template_args, ends_bytes=bool(data.add_eos))
    return replace(template, in_parts=True) if data.images else template


def describe_template(data: DataConfig, tokenizer: str, vocab_size: int) -> Iterator[str]:
    """Yield a line that names the chat template, and warnings of what a model would not learn from it.

    Raises ConfigError as load_chat_template.
    """
    data, is_bytes = with_marks(data, tokenizer, vocab_size), tokenizer == "bytes"
    template = template_of(data, tokenizer)
    yield f"template  {template.name}"
    own = with_ends_of(template, load_tokenizer(tokenizer))
    fitting = ", ".join(fitting_templates(None if is_bytes else tokenizer_folder(tokenizer)))
    having = f"(this tokenizer has the marks of {fitting or 'none of the named ones'})"
    if last_mark(own, after := text_after_answer(template)) is None:
        marked = f"set data.chat_template to one that ends answers with a special token {having}"
        text = "ends an answer with ordinary text, at which megatrain generate stops and other programs do not"
        blanks = "writes only blanks after an answer, so a model would not learn to stop"
        yield (
            f"warning: this template {text if after.strip() else blanks}; "
            f"{_end_of_bytes(data, vocab_size) if is_bytes else marked}"
        )
    if (mark := unlearned_mark(own, template)) is not None:
        yield (
            f"warning: the {{% generation %}} tags of this template leave out {own.token_of(mark)}, which ends answers,"
            " so a model would not learn to stop; set data.chat_template to one that has it within the tags"
        )
    if lacks_bos(own, template):
        yield (
            f"warning: this tokenizer begins every text with {own.token_of(own.bos or 0)}, and the template does not "
            f"write it; set data.chat_template to one that does {having}"
        )


def _end_of_bytes(data: DataConfig, vocab_size: int) -> str:
    """Return advice for a model of bytes whose template ends answers with ordinary text, so that it cannot stop."""
    if data.add_eos:
        return "write {{ eos_token }} there, or leave data.chat_template out"
    if vocab_size <= ByteTokenizer.end_of_document:
        return f"give the model a vocab_size of {ByteTokenizer.end_of_document + 1} or more, with an id for the end"
    return "in a new run data.add_eos: true ends answers with an id of its own"
