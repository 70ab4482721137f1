"""Writes the tokenizer `bytes` as files that Transformers reads, so that an exported model of bytes has a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatrain_ray.io.tokens.tokenizer import END_NAME, ByteTokenizer


def write_byte_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: id b is byte b, id 256 the end of a document.

    vocab_size: of the model; one of 256 entries has no id for the end.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # true would remove blanks from decoded text
    }
    if vocab_size > ByteTokenizer.end_of_document:
        tokenizer.add_special_tokens([AddedToken(END_NAME, special=True, normalized=False)])
        settings |= {"eos_token": END_NAME, "pad_token": END_NAME}
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def is_byte_tokenizer(folder: Path) -> bool:
    """Return whether the tokenizer in a folder is one that `write_byte_tokenizer` wrote."""
    try:
        model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
        return bool(model["vocab"] == _byte_characters() and not model["merges"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _byte_characters() -> dict[str, int]:
    """Return the character that stands for each byte in byte-level tokenizers, with the byte as its id.

    A printable byte of Latin-1 stands for itself; the others are, in order, the characters from 256 on. (GPT-2,
    https://github.com/openai/gpt-2/blob/master/src/encoder.py)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
