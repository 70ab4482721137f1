"""Encodes texts as their bytes, and writes this tokenizer as files that Transformers reads with exported models."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.tokens.token_files import TokenArray, TokenBlock

END_NAME = "<|endoftext|>"  # of the id 256 of ByteTokenizer


class PlacedTokens(NamedTuple):
    """Holds the ids of a text and the characters [start, end) that each stands for, alone or with others."""

    ids: TokenArray  # [num_tokens]
    starts: NDArray[np.int64]  # [num_tokens]
    ends: NDArray[np.int64]  # [num_tokens]


class ByteTokenizer:
    """Encodes each byte of UTF-8 as one id, 0 to 255. Id 256 is the end of a document, and may be that of an answer."""

    num_ids = 256  # a number greater than every id of a text
    bos = None  # the id of the token that begins a text; None: there is none
    adds_bos = False  # whether Transformers begins a text with it
    # What decides ids in addition to the files, as data for JSON; empty where ids are those of tokenizer.json alone.
    extension: Mapping[str, bool | str] = MappingProxyType({})
    end_of_document = 256  # the id to put between two documents

    def __init__(self, *, marked: bool = False) -> None:
        """Encode as the files of this tokenizer in an export do if `marked`: END_NAME in a text is then one id, 256."""
        self._marked = marked
        self.mark_ids = frozenset({self.end_of_document} if marked else ())

    def encode(self, text: str) -> TokenArray:
        """Return the ids of a text, 1-D. No special tokens are added."""
        return self.encode_placed(text).ids if self._marked else np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: TokenArray) -> str:
        """Return the text of ids, for people to read: marks included, and � for what is no whole character.

        Ids beyond that of the end, which a model with more entries may sample, are no characters.
        """
        others = {self.end_of_document: END_NAME.encode()}
        text = b"".join(others.get(token, b"\xff") if token > 255 else bytes([token]) for token in ids.tolist())
        return text.decode("utf-8", errors="replace")

    def token_of(self, token_id: int) -> str:
        return self.decode(np.array([token_id]))

    def encode_placed(self, text: str) -> PlacedTokens:
        """Return the ids that `encode` gives, each with its range of characters in the text."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        starts = np.repeat(np.arange(codes.size), widths)
        ids, ends = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32), starts + 1
        kept = np.ones(ids.size, np.bool_)
        for found in re.finditer(re.escape(END_NAME), text) if self._marked else ():
            first, after = np.searchsorted(starts, found.span())
            ids[first], ends[first], kept[first + 1 : after] = self.end_of_document, found.end(), False
        return PlacedTokens(ids[kept], starts[kept], ends[kept])

    def encode_all(self, blocks: Iterable[TextBlock]) -> Generator[TokenBlock]:
        """Yield the ids of documents in their order, as `encode` gives them for each whole text."""
        for block in blocks:
            yield TokenBlock(self.encode(block.text), block.ends, block.location)


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
