"""Text to token ids: plain bytes, or the tokenizer of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from megatrain_ray.errors import ConfigError

TokenArray = NDArray[np.unsignedinteger[Any]]


# What AutoTokenizer reads beside tokenizer.json.
FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class PlacedTokens(NamedTuple):
    """Ids of a text and the characters each stands for: [start, end). Tokens of one character share its place."""

    ids: TokenArray  # [num_tokens]
    starts: NDArray[np.int64]  # [num_tokens]
    ends: NDArray[np.int64]  # [num_tokens]


class Tokenizer(Protocol):
    def encode(self, text: str) -> TokenArray:
        """The ids of a text, 1-D. No special tokens are added."""

    def encode_placed(self, text: str) -> PlacedTokens:
        """The same ids, each with its place in the text."""


class ByteTokenizer:
    """One id a byte of UTF-8, 0-255. Id 256 is kept free for the end of a document."""

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_placed(self, text: str) -> PlacedTokens:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        starts = np.repeat(np.arange(codes.size), widths)
        return PlacedTokens(self.encode(text), starts, starts + 1)


class FolderTokenizer:
    """The tokenizer.json of a Hugging Face folder: local, and data only, no code of the folder runs."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where the folder or its tokenizer.json is missing or broken."""
        self._tokenizer = _read(folder)
        self._tokenizer.no_truncation()  # a stored limit would cut a document short, and silently
        self._tokenizer.no_padding()
        # It would add special tokens, which nothing here asks for, or take the space before a word out of its place.
        self._tokenizer.post_processor = processors.Sequence([])

    def encode(self, text: str) -> TokenArray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_placed(self, text: str) -> PlacedTokens:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return PlacedTokens(np.array(encoding.ids, np.uint32), places[:, 0], places[:, 1])


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a folder that holds a tokenizer.json. Raises ConfigError."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(Path(name))


def _read(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        missing = file if folder.is_dir() else folder
        raise ConfigError(
            f"data.tokenizer: no such {'file' if folder.is_dir() else 'folder'}: {missing}; "
            "expected `bytes` or a local folder that holds a tokenizer.json"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ConfigError(f"data.tokenizer: cannot read {file}: {error}") from None


def tokenizer_files(name: str) -> tuple[Path, ...]:
    """The files that make up a tokenizer; none for `bytes`, and none where its folder is gone."""
    paths = () if name == "bytes" else tuple(Path(name) / file for file in FILE_NAMES)
    return tuple(path for path in paths if path.is_file())
