"""Holds chat templates by name, for tokenizers that have none, and checks that a tokenizer has their marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, named_tokens

FOLDER = Path(__file__).parent / "templates"
PLAIN = "plain"  # what is used if there is nothing else
EOS = "eos_token"  # stands for the tokenizer's own
MARKS: dict[str, tuple[str, ...]] = {  # tokens that a template writes around turns
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": (EOS,),
}


def read_named_template(name: str) -> str:
    """Return the source of `PLAIN` or of one of `MARKS`."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


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
