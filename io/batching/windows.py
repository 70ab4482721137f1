"""Cuts documents into windows of seq_len + 1 tokens: seq_len inputs, and the same shifted by one as targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError, NothingToLearnError
from megatrain_ray.io.batching.corpus import Corpus
from megatrain_ray.io.tokens.image_files import IMAGE
from megatrain_ray.io.tokens.mapped_file import values_at
from megatrain_ray.io.tokens.token_files import WEIGHT_TYPE, Columns, LossWeights

PAD = 0  # any id would do: no supervised token attends to a pad


class Rows(NamedTuple):
    """Holds windows as rows of equal length, which is seq_len + 1 unless windows are divided into parts.

    documents: a number that tells the documents of a row apart; -1 for a pad.
    loss_weights: how much a token counts in the loss when it is a target.
    logprobs: of each token as a target; 0 where it is none, or if the windows have none. With a teacher, its records
        (teacher_files.py).
    columns: the corpus's, in its order.
    """

    ids: NDArray[np.int64]  # [rows, seq_len + 1]
    documents: NDArray[np.int64]  # [rows, seq_len + 1]
    loss_weights: LossWeights  # [rows, seq_len + 1]
    logprobs: NDArray[Any]  # [rows, seq_len + 1]
    columns: Columns  # [rows, seq_len + 1, num_columns]

    @staticmethod
    def of_pads(num_rows: int, seq_len: int, kind: np.dtype[Any] = WEIGHT_TYPE, num_columns: int = 0) -> Rows:
        """Return rows of nothing. `kind`: of `logprobs`."""
        shape = (num_rows, seq_len + 1)
        weights, columns = np.zeros(shape, WEIGHT_TYPE), np.zeros((*shape, num_columns), WEIGHT_TYPE)
        return Rows(np.full(shape, PAD), np.full(shape, -1), weights, np.zeros(shape, kind), columns)


@dataclass(frozen=True, eq=False)
class SpanWindows:
    """Makes each window of one or several spans of the corpus, side by side, and pads.

    joins_documents: whether a window may hold several documents.
    documents_per_record, labelled: as for `cut`. Windows of labelled answers come with one more: window i + num_windows
        holds the mismatched ones.
    row_parts: number of rows that `assemble` divides a window into. Each span is in a part of its own if there are two.
    first_image: number of the corpus's first image among those of all sources.
    """

    corpus: Corpus
    starts: NDArray[np.int64]  # [num_spans], start of each span in the tokens of the corpus, window by window
    lengths: NDArray[np.int64]  # [num_spans]
    firsts: NDArray[np.int64]  # [all windows + 1], index of each window's first span
    seq_len: int
    joins_documents: bool
    logprobs: NDArray[Any] | None = None  # [num_places]
    documents_per_record: int = 0
    row_parts: int = 1
    labelled: bool = False
    first_image: int = 0

    @staticmethod
    def of_documents(corpus: Corpus, seq_len: int, *, whole: bool = False) -> SpanWindows:
        """Cut each document separately, with a stride of seq_len + 1.

        The last short window of a document is dropped, unless it is the document's only one or `whole` is set. A window
        of one token is always dropped, because it has no target.
        """
        width = seq_len + 1
        lengths = np.asarray(corpus.document_lengths)
        full, rest = np.divmod(lengths, width)
        counts = full + ((rest > 1) & (whole | (full == 0)))
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return SpanWindows(
            corpus,
            starts=np.repeat(np.cumsum(lengths) - lengths, counts) + within * width,
            lengths=np.minimum(np.repeat(lengths, counts) - within * width, width),
            firsts=np.arange(within.size + 1),
            seq_len=seq_len,
            joins_documents=False,
        )

    @staticmethod
    def of_sequences(
        corpus: Corpus, seq_len: int, *, packing: bool = True, documents_per_record: int = 0
    ) -> SpanWindows:
        """Pack sequences of chats without cutting any: each goes into the first window that has room.

        packing: else each has a window of its own, of which each of two documents of a record has half.
        documents_per_record: as for `cut`. Those of a record stay together, and all of their tokens are inputs.
        """
        lengths, together = np.asarray(corpus.document_lengths), documents_per_record or 1
        sums = lengths.reshape(-1, together).sum(axis=1)
        windows = np.repeat(
            first_fit(sums, seq_len + (not documents_per_record)) if packing else np.arange(sums.size), together
        )
        return SpanWindows._of_windows(
            corpus, seq_len, windows, joins_documents=packing, documents_per_record=documents_per_record,
            row_parts=1 if packing else together,
        )  # fmt: skip

    @staticmethod
    def of_labelled(corpus: Corpus, seq_len: int, *, packing: bool) -> SpanWindows:
        """Pack labelled answers, and the mismatched ones into as many windows of their own, without cutting any.

        packing: as for of_sequences.
        """
        lengths = np.asarray(corpus.document_lengths)
        longer = lengths.reshape(-1, 2).max(axis=1)
        windows = first_fit(longer, seq_len + 1) if packing else np.arange(longer.size)
        windows = np.stack([windows, windows + windows.max(initial=-1) + 1], axis=1).ravel()
        return SpanWindows._of_windows(
            corpus, seq_len, windows, joins_documents=packing, documents_per_record=1, labelled=True
        )

    @staticmethod
    def _of_windows(corpus: Corpus, seq_len: int, windows: NDArray[np.int64], **facts: Any) -> SpanWindows:
        """Put each document into a window. windows: [num_documents], their numbers."""
        lengths = np.asarray(corpus.document_lengths)
        order = np.argsort(windows, kind="stable")
        firsts = np.searchsorted(windows[order], np.arange(windows.max(initial=-1) + 2))
        starts = np.cumsum(lengths) - lengths
        return SpanWindows(corpus, starts[order], lengths[order], firsts, seq_len, **facts)

    @property
    def num_windows(self) -> int:
        """Return how many windows are drawn. Those of mismatched answers come with theirs."""
        return (self.firsts.size - 1) // (2 if self.labelled else 1)

    @property
    def num_places(self) -> int:
        """Return how many tokens the windows are cut from."""
        return self.corpus.tokens.size

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each window's tokens among those that windows are cut from; -1 for a pad."""
        return self._spread(indices)[0]

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        """Return the windows of these indices; short ones are padded.

        A row of labelled answers is the window of the mismatched ones after their own, so it has twice as many tokens.
        """
        if self.labelled:
            both = [self._rows(indices), self._rows(indices + self.num_windows)]
            return Rows(*(np.concatenate(parts, axis=1) for parts in zip(*both, strict=True)))
        return self._rows(indices)

    def _rows(self, indices: NDArray[np.int64]) -> Rows:
        places, documents = self._spread(indices)
        real, at, weights = places >= 0, np.maximum(places, 0), self.corpus.loss_weights
        return Rows(
            np.where(real, values_at(self.corpus.tokens, at).astype(np.int64), PAD),
            documents,
            (real if weights is None else np.where(real, values_at(weights, at), 0)).astype(WEIGHT_TYPE),
            _logprobs_at(places, self.logprobs),
            self._columns(places),
        )

    def _columns(self, places: NDArray[np.int64]) -> Columns:
        columns = _columns_at(places, self.corpus.columns)
        if self.first_image:
            of_images = columns[..., list(self.corpus.columns).index(IMAGE)]
            of_images[of_images > 0] += self.first_image
        return columns

    def _spread(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return places and documents of the windows' tokens."""
        part = self.seq_len // self.row_parts + 1
        places, documents = (np.full((indices.size, self.row_parts * part), -1) for _ in range(2))
        for row, window in enumerate(indices):
            end = 0
            for document, span in enumerate(range(self.firsts[window], self.firsts[window + 1])):
                start, length = self.starts[span], self.lengths[span]
                end = end if self.row_parts == 1 else document * part
                places[row, end : end + length] = np.arange(start, start + length)
                documents[row, end : end + length] = document
                end += length
        return places, documents


@dataclass(frozen=True, eq=False)
class PackedWindows:
    """Joins documents by the end-of-document id and cuts them with a stride of seq_len + 1.

    The short window at the end is dropped, unless it is the only one or `whole` is set. An end-of-document id belongs
    to the document before it; the last document has none.
    """

    corpus: Corpus
    seq_len: int
    end_of_document: int
    whole: bool = False
    logprobs: NDArray[Any] | None = None  # [num_places]
    joins_documents: ClassVar[bool] = True
    documents_per_record: ClassVar[int] = 0
    row_parts: ClassVar[int] = 1
    labelled: ClassVar[bool] = False

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Return the start of each document in the joined tokens, [num_documents]."""
        lengths = np.asarray(self.corpus.document_lengths)
        return np.cumsum(lengths) - lengths + np.arange(lengths.size)

    @property
    def num_places(self) -> int:
        """Return how many tokens the windows are cut from, with the ids between documents."""
        return self.corpus.tokens.size + self.corpus.num_documents - 1

    @property
    def num_windows(self) -> int:
        full, rest = divmod(self.num_places, self.seq_len + 1)
        return full + int(rest > 1 and (self.whole or full == 0)) if self.corpus.tokens.size else 0

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each window's tokens among those that windows are cut from; -1 for a pad."""
        at = indices[:, None] * (self.seq_len + 1) + np.arange(self.seq_len + 1)
        return np.where(at < self.num_places, at, -1)

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        places = self.places(indices)
        real, at = places >= 0, np.maximum(places, 0)
        documents = np.searchsorted(self.starts, at, side="right") - 1
        is_end = at - self.starts[documents] == self.corpus.document_lengths[documents]
        # Every earlier document has added one end-of-document id to the joined tokens.
        ids = values_at(self.corpus.tokens, np.minimum(at - documents, self.corpus.tokens.size - 1)).astype(np.int64)
        ids = np.where(is_end, self.end_of_document, ids)
        return Rows(
            np.where(real, ids, PAD),
            np.where(real, documents, -1),
            real.astype(WEIGHT_TYPE),
            _logprobs_at(places, self.logprobs),
            _columns_at(places, {}),
        )


def _logprobs_at(places: NDArray[np.int64], logprobs: NDArray[Any] | None) -> NDArray[Any]:
    found = np.zeros(places.shape, WEIGHT_TYPE if logprobs is None else logprobs.dtype)
    if logprobs is not None:
        found[places >= 0] = values_at(logprobs, places[places >= 0])
    return found


def _columns_at(places: NDArray[np.int64], columns: Mapping[str, Columns]) -> Columns:
    found = np.zeros((*places.shape, len(columns)), WEIGHT_TYPE)
    for number, column in enumerate(columns.values()):
        found[..., number] = _logprobs_at(places, column)
    return found


Windows = SpanWindows | PackedWindows


def cut(
    corpus: Corpus, *, seq_len: int, packing: bool, vocab_size: int, whole: bool = False, documents_per_record: int = 0,
    labelled: bool = False,
) -> Windows:  # fmt: skip
    """Cut a corpus into windows.

    One document is cut in the same way with packing and without. Sequences of chats, of at most seq_len + 1 tokens,
    stay whole; those of a record, if the objective is of whole documents, have at most seq_len tokens.

    whole: whether to keep the last short windows, so that no document is left out.
    documents_per_record: sequences that are the answers of one record, one after the other: 2 of a preference. They
        are not cut, and the objective is of whole documents. 0: it is of single tokens.
    labelled: whether answers are labelled good or bad: the loss weights of bad ones are negative, and each is followed
        by a mismatched one, of which only the log-probabilities count.

    Raises ConfigError if there is no window, or if several documents are to be packed and the tokenizer has no
    end-of-document id or one outside the vocabulary.
    """
    windows: Windows
    if labelled:
        windows = SpanWindows.of_labelled(corpus, seq_len, packing=packing)
    elif documents_per_record:
        windows = SpanWindows.of_sequences(corpus, seq_len, packing=packing, documents_per_record=documents_per_record)
    elif packing and corpus.num_documents > 1 and corpus.loss_weights is not None:
        windows = SpanWindows.of_sequences(corpus, seq_len)
    elif packing and corpus.num_documents > 1:
        windows = PackedWindows(corpus, seq_len, _end_of_document(corpus, vocab_size), whole)
    else:
        windows = SpanWindows.of_documents(corpus, seq_len, whole=whole)
    if not windows.num_windows:
        raise NothingToLearnError(
            f"data.path: nothing to learn in {corpus.name}: a window needs 2 tokens, got {corpus.tokens.size} in "
            f"{corpus.num_documents} document(s)"
        )
    return windows


def _end_of_document(corpus: Corpus, vocab_size: int) -> int:
    end = corpus.end_of_document
    if end is None:
        raise ConfigError(
            "data.tokenizer: its tokenizer_config.json and special_tokens_map.json name no eos_token that its "
            "tokenizer.json has, and documents are joined by that; add one, or set data.packing: false"
        )
    if end >= vocab_size:
        raise ConfigError(
            f"data.tokenizer: the end of a document has id {end}, but the model's vocab_size is {vocab_size}; use a "
            f"model of at least {end + 1} entries, or set data.packing: false"
        )
    return end


OPEN_ROWS = 256  # rows searched for room: searching all of them would take time quadratic in their number


def first_fit(lengths: NDArray[np.integer[Any]], capacity: int) -> NDArray[np.int64]:
    """Return the row of each sequence; rows are numbered in the order they are begun.

    A sequence goes into the first row with room among the last 256 rows begun. No sequence may be longer than
    `capacity`. The result must never change, because a saved position counts rows.
    """
    room = np.full(lengths.size + 1, capacity)
    rows = np.empty(lengths.size, np.int64)
    num_rows = 0
    for index, length in enumerate(lengths.tolist()):
        oldest = max(num_rows - OPEN_ROWS, 0)
        row = oldest + int((room[oldest : num_rows + 1] >= length).argmax())  # the last one is empty, so one has room
        room[row] -= length
        rows[index] = row
        num_rows = max(num_rows, row + 1)
    return rows
