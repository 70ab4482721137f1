"""Documents to windows of seq_len + 1 tokens: seq_len inputs, and the same shifted by one as targets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.documents import find_documents, read_document
from megatrain_ray.io.tokenizer import TokenArray, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Fingerprint:
    """Tells one tokenised data set, cut into its documents, from another."""

    num_tokens: int
    crc32: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens with checksum {self.crc32:08x}"


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """The tokens of all documents, one after the other (uint16 or uint32), and where windows lie in them."""

    tokens: TokenArray  # [num_tokens]
    starts: NDArray[np.int64]  # [num_windows]
    lengths: NDArray[np.int64]  # [num_windows], seq_len + 1 but for the only window of a short document
    document_lengths: NDArray[np.int64]
    seq_len: int

    @property
    def num_windows(self) -> int:
        return self.starts.size

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.num_tokens, zlib.crc32(self.document_lengths.data, zlib.crc32(self.tokens.data)))


def load_windows(
    path: str | Sequence[str], tokenizer: str, *, seq_len: int, packing: bool, vocab_size: int
) -> TokenWindows:
    """Reads, tokenises and cuts the documents of `data.path`.

    Raises ConfigError for input that cannot be read or holds no window, an id outside the model's vocabulary, and
    several documents with packing.
    """
    files = find_documents(path)
    if packing and len(files) > 1:
        raise ConfigError(
            f"data.packing: true with {len(files)} documents (data.path: {files[0]} and others): attention within a "
            "document comes with a later version; set data.packing: false, which cuts each document alone, or give "
            "one file"
        )
    encoder = load_tokenizer(tokenizer)
    windows = cut([_encode(file, encoder, vocab_size) for file in files], seq_len)
    if not windows.num_windows:
        raise ConfigError(
            f"data.path: nothing to learn in {', '.join(map(str, files))}: a window needs 2 tokens, got "
            f"{windows.num_tokens} in {len(files)} document(s)"
        )
    return windows


def cut(documents: Sequence[TokenArray], seq_len: int) -> TokenWindows:
    """Cuts each document alone, with a stride of seq_len + 1.

    A document's last short window is dropped unless it is the document's only one; one token alone has no target.
    """
    width = seq_len + 1
    lengths = np.array([d.size for d in documents], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    full = lengths // width
    counts = np.where(full > 0, full, lengths > 1)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return TokenWindows(
        tokens=np.concatenate(documents),
        starts=np.repeat(offsets, counts) + within * width,
        lengths=np.repeat(np.minimum(lengths, width), counts),
        document_lengths=lengths,
        seq_len=seq_len,
    )


def _encode(file: Path, tokenizer: Tokenizer, vocab_size: int) -> TokenArray:
    ids = tokenizer.encode(read_document(file))
    highest = int(ids.max(initial=0))
    if highest >= vocab_size:
        raise ConfigError(
            f"data.tokenizer: {file} has token id {highest}, but the model's vocab_size is {vocab_size}; use the "
            f"model's own tokenizer, or a model of at least {highest + 1} entries"
        )
    return ids.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
