"""Memory-maps the tokens of one data source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.tokens.token_block import Mask, TokenArray
from megatrain_ray.io.tokens.token_cache import read_meta
from megatrain_ray.io.tokens.token_writer import (
    ID_TYPES,
    LENGTH_TYPE,
    LENGTHS_NAME,
    MASK_NAME,
    MASK_TYPE,
    TOKENS_NAME,
    check_id,
    id_bytes,
)


@dataclass(frozen=True)
class Fingerprint:
    """Identifies one tokenised data set, cut into its documents."""

    num_tokens: int
    crc32: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens with checksum {self.crc32:08x}"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Holds the documents of one data source as one array of tokens, in order and without separators.

    name: what data.path calls the source, for messages.
    supervised: true where a token counts in the loss, for chats, of which each sequence is a document; None: all do.
    """

    name: str
    tokens: TokenArray  # [num_tokens]
    document_lengths: NDArray[np.int64]  # [num_documents]
    fingerprint: Fingerprint
    end_of_document: int | None  # id to put between two documents when they are joined; None: the tokenizer has none
    supervised: Mask | None = None  # [num_tokens]

    @property
    def num_documents(self) -> int:
        return self.document_lengths.size


def open_corpus(name: str, folder: Path, vocab_size: int) -> Corpus:
    """Memory-map a folder of `make_tokens`. Raises ConfigError if it is gone, or has an id outside the vocabulary."""
    meta = read_meta(folder)
    if meta is None:
        raise ConfigError(
            f"data.path: the tokens of {name} are not in {folder}, where they were when the run started; start again"
        )
    check_id(meta.highest_id, meta.highest_file, vocab_size)
    return Corpus(
        name=name,
        tokens=_map(folder / TOKENS_NAME, ID_TYPES[meta.itemsize], meta.num_tokens),
        document_lengths=_map(folder / LENGTHS_NAME, LENGTH_TYPE, meta.num_documents),
        # The checksum for ids as wide as the vocabulary needs, even if the file's are wider: saves have always recorded
        # this one.
        fingerprint=Fingerprint(meta.num_tokens, meta.crc32[id_bytes(vocab_size)]),
        end_of_document=meta.end_of_document,
        supervised=None if meta.num_supervised is None else _map(folder / MASK_NAME, MASK_TYPE, meta.num_tokens),
    )


def _map(path: Path, kind: np.dtype[Any], size: int) -> NDArray[Any]:
    """Memory-map `size` elements, read from disk on access; an empty file, which mmap refuses, gives an empty array."""
    return np.memmap(path, kind, "r", shape=(size,)) if size else np.empty(0, kind)
