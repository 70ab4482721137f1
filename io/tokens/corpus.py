"""The tokens of one data source, as they lie on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.tokens.token_block import Mask, TokenArray
from megatrain_ray.io.tokens.token_cache import check_ids, read_meta
from megatrain_ray.io.tokens.token_writer import (
    ID_TYPES,
    LENGTH_TYPE,
    LENGTHS_NAME,
    MASK_NAME,
    MASK_TYPE,
    TOKENS_NAME,
    id_bytes,
)


@dataclass(frozen=True)
class Fingerprint:
    """Tells one tokenised data set, cut into its documents, from another."""

    num_tokens: int
    crc32: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens with checksum {self.crc32:08x}"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents one after the other. `name`: what data.path calls them. `supervised`: which tokens are learned, for
    sequences of chats, of which each is a document; None: all."""

    name: str
    tokens: TokenArray  # [num_tokens]
    document_lengths: NDArray[np.int64]  # [num_documents]
    fingerprint: Fingerprint
    end_of_document: int | None  # the id that stands between two documents; None: the tokenizer has none
    supervised: Mask | None = None  # [num_tokens]

    @property
    def num_documents(self) -> int:
        return self.document_lengths.size


def open_corpus(name: str, folder: Path, vocab_size: int) -> Corpus:
    """Maps a folder of make_tokens. Raises ConfigError where it is gone, or has an id outside the vocabulary."""
    meta = read_meta(folder)
    if meta is None:
        raise ConfigError(
            f"data.path: the tokens of {name} are not in {folder}, where they were when the run started; start again"
        )
    check_ids(meta, vocab_size)
    return Corpus(
        name=name,
        tokens=_map(folder / TOKENS_NAME, ID_TYPES[meta.itemsize], meta.num_tokens),
        document_lengths=_map(folder / LENGTHS_NAME, LENGTH_TYPE, meta.num_documents),
        # Of ids as wide as the vocabulary needs, whatever is on the disk: what saves have recorded from the first on.
        fingerprint=Fingerprint(meta.num_tokens, meta.crc32[id_bytes(vocab_size)]),
        end_of_document=meta.end_of_document,
        supervised=None if meta.num_supervised is None else _map(folder / MASK_NAME, MASK_TYPE, meta.num_tokens),
    )


def _map(path: Path, kind: np.dtype[Any], size: int) -> NDArray[Any]:
    """Read from the disk as it is used; mmap knows no empty files."""
    return np.memmap(path, kind, "r", shape=(size,)) if size else np.empty(0, kind)
