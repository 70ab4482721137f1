"""Memory-maps a folder of tokens as the documents of a data source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.tokens.mapped_file import map_file
from megatrain_ray.io.tokens.token_files import (
    ID_TYPES,
    LENGTH_TYPE,
    LENGTHS_NAME,
    TOKENS_NAME,
    WEIGHT_TYPE,
    Columns,
    TokenArray,
    check_id,
    column_file,
    id_bytes,
    read_meta,
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
    loss_weights: how much each token counts in the loss, for chats, of which each sequence is a document: booleans if
        all weigh 0 or 1, else FP32; None: all count 1.
    columns: further numbers of each token, by name.
    """

    name: str
    tokens: TokenArray  # [num_tokens]
    document_lengths: NDArray[np.int64]  # [num_documents]
    fingerprint: Fingerprint
    end_of_document: int | None  # id to put between two documents when they are joined; None: the tokenizer has none
    loss_weights: NDArray[Any] | None = None  # [num_tokens]
    columns: Mapping[str, Columns] = field(default_factory=dict)  # [num_tokens] each

    @property
    def num_documents(self) -> int:
        return self.document_lengths.size

    @property
    def weighted(self) -> bool:
        """Return whether tokens may count in the loss by other weights than 0 and 1."""
        return self.loss_weights is not None and self.loss_weights.dtype == WEIGHT_TYPE

    def part(self, documents: slice) -> Corpus:
        """Return some consecutive documents."""
        before, chosen = self.document_lengths[: documents.start], self.document_lengths[documents]
        at = slice(int(before.sum()), int(before.sum() + chosen.sum()))
        weights = None if self.loss_weights is None else self.loss_weights[at]
        columns = {name: values[at] for name, values in self.columns.items()}
        return replace(self, tokens=self.tokens[at], document_lengths=chosen, loss_weights=weights, columns=columns)


def open_corpus(name: str, folder: Path, vocab_size: int) -> Corpus:
    """Memory-map a folder of `make_tokens`. Raises ConfigError if it is gone, or has an id outside the vocabulary."""
    meta = read_meta(folder)
    if meta is None:
        raise ConfigError(
            f"data.path: the tokens of {name} are not in {folder}, where they were when the run started; start again"
        )
    check_id(meta.highest_id, meta.highest_file, vocab_size)
    has_weights, (weights_name, weight_type) = meta.num_supervised is not None, meta.weights_file
    return Corpus(
        name=name,
        tokens=map_file(folder / TOKENS_NAME, ID_TYPES[meta.itemsize], meta.num_tokens),
        document_lengths=map_file(folder / LENGTHS_NAME, LENGTH_TYPE, meta.num_documents),
        # The checksum for ids as wide as the vocabulary needs, even if the file's are wider: saves have always recorded
        # this one.
        fingerprint=Fingerprint(meta.num_tokens, meta.crc32[id_bytes(vocab_size)]),
        end_of_document=meta.end_of_document,
        loss_weights=map_file(folder / weights_name, weight_type, meta.num_tokens) if has_weights else None,
        columns={name: map_file(folder / column_file(name), WEIGHT_TYPE, meta.num_tokens) for name in meta.columns},
    )
