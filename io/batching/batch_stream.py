"""Makes batches of windows: for training in a shuffled order, with a position to resume from, and for evaluation."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.splitmix import splitmix64, splitmix64_chain
from megatrain_ray.io.batching.windows import Rows, Windows
from megatrain_ray.io.tokens.token_files import ADVANTAGE, IGNORED, WEIGHT_TYPE, Fingerprint

MARGINS = "margins"
LABELS = "labels"  # column: 1 at targets of good answers, -1 at those of bad ones
MOST_EPOCHS = 1 << 40  # of a position that a run can have reached


class BatchCounts(NamedTuple):
    """Counts what a loss may be a mean over: the documents of an update, and their supervised targets."""

    documents: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Holds the sequences of one update. A target of -100 is not supervised, or its document has no next token.

    The loss of an update is the mean over its targets, weighted by `loss_weights`.

    These are arrays and no tensors, since the data process does not import torch.
    """

    input_ids: NDArray[np.int64]  # [batch, seq_len]
    targets: NDArray[np.int64]  # [batch, seq_len]
    # [batch, seq_len], beginning at 0 in each document of a row, and at its pads; None: one document a row
    positions: NDArray[np.int64] | None
    num_supervised: int  # targets that count in the loss
    num_tokens: int  # inputs that are no pads
    sum_squared_lengths: int  # Σ over the documents of all rows of (number of inputs)²
    # [batch, seq_len], how much each target counts in the loss, 0 if it is -100; None: each counts 1, unless -100
    loss_weights: NDArray[np.float32] | None = None
    real: NDArray[np.bool_] | None = None  # [batch, seq_len], which inputs are no pads; None: all
    # [batch, seq_len], log-probabilities of the targets in a reference model, 0 if a target is -100; None: no reference
    reference_logprobs: NDArray[np.float32] | None = None
    # What a teacher predicts where a target counts: int32 ids [batch, seq_len, k], ascending; FP32 log-probabilities
    # [batch, seq_len, c] of these and, if c > k, of all others together. Zeros elsewhere. None: no teacher
    teacher: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    # By name: further numbers of the targets, [batch, seq_len], 0 if a target is -100; but MARGINS are those of
    # preferences, at the first tokens of chosen answers.
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    # Documents that are whole answers, of which the objective has a loss. Each two of preferences are one, the chosen
    # one first. None: the objective is of single tokens.
    num_documents: int | None = None
    rewards: NDArray[np.float32] | None = None  # of each document of rollouts, NaN if unknown
    row_parts: int = 1  # rows for each window: 2 if both answers of a preference have rows of their own
    # With LABELS: as many rows, with the prompt of each document and an answer to another one.
    mismatched: Batch | None = None

    @property
    def counts(self) -> BatchCounts | None:
        """Return what the loss of whole answers is a mean over; None: the objective is of single tokens."""
        return None if self.num_documents is None else BatchCounts(self.num_documents, self.num_supervised)

    @property
    def means(self) -> dict[str, tuple[float, float]]:
        """Return what is known of rollouts without a model, as sums and what they are divided by."""
        if self.rewards is None or self.num_documents is None:
            return {}
        known = self.rewards[~np.isnan(self.rewards)].astype(np.float64)
        return {
            "reward": (float(known.sum()), known.size),  # which records with advantages may lack
            "answer_tokens": (self.num_supervised, self.num_documents),
        }

    @property
    def total_weight(self) -> float:
        """Return what a step's loss of single tokens is divided by: the sum of the weights of all targets."""
        if self.loss_weights is None:
            return self.num_supervised
        return float(np.asarray(self.loss_weights, np.float64).sum())


class BatchStream:
    """Draws the windows of one source epoch after epoch. They depend only on the data, the seed and the position.

    A batch may span epochs. The state is (epoch, cursor).
    """

    def __init__(self, windows: Windows, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self._windows = windows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._begin(epoch=0)

    @property
    def joins_documents(self) -> bool:
        """Return whether a row may hold several documents."""
        return self._windows.joins_documents

    @property
    def weighted(self) -> bool:
        """Return whether batches have loss weights."""
        return self._windows.corpus.weighted

    @property
    def referenced(self) -> bool:
        """Return whether batches have log-probabilities of a reference, or records of a teacher."""
        return self._windows.logprobs is not None

    @property
    def kind(self) -> BatchKind:
        return BatchKind.of(self._windows)

    @property
    def num_windows(self) -> int:
        """Return the windows of an epoch."""
        return self._windows.num_windows

    @property
    def num_drawn(self) -> int:
        """Return how many windows have been drawn since the start of the first epoch."""
        return self._epoch * self._windows.num_windows + self._cursor

    @property
    def position(self) -> dict[str, Any]:
        """Return the position of the next batch and a fingerprint of the data, as data for JSON and for `seek`."""
        return {"epoch": self._epoch, "cursor": self._cursor, **dataclasses.asdict(self._windows.corpus.fingerprint)}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for one of other data or outside this data."""
        corpus, num_windows = self._windows.corpus, self._windows.num_windows
        wrong = [key for key in self.position if type(position.get(key)) is not int]
        if wrong or position["epoch"] > MOST_EPOCHS:
            raise ConfigError(f"the saved data position {dict(position)} is damaged: see {(wrong or ['epoch'])[0]}")
        saved = Fingerprint(position["num_tokens"], position["crc32"])
        if saved != corpus.fingerprint:
            raise ConfigError(
                f"the run was saved with other data than {corpus.name} holds now: {saved} then, {corpus.fingerprint} "
                "now; restore the files the run was started with, or start a new run_dir"
            )
        if position["epoch"] < 0 or not 0 <= position["cursor"] < num_windows:
            raise ConfigError(
                f"the saved data position (epoch {position['epoch']}, cursor {position['cursor']}) is outside of the "
                f"{num_windows} windows of an epoch of {corpus.name}; data.seq_len differs, or the save is damaged"
            )
        self._begin(position["epoch"], position["cursor"])

    def next_batch(self) -> Batch:
        rows = self.draw(self._batch_size)
        return assemble(rows, **self.kind._asdict())

    def draw(self, count: int) -> Rows:
        """Return the next `count` windows."""
        drawn: list[NDArray[np.int64]] = []
        while count:
            part = self._order[self._cursor : self._cursor + count]
            drawn.append(part)
            count -= part.size
            self._cursor += part.size
            if self._cursor == self._windows.num_windows:
                self._begin(self._epoch + 1)
        return self._windows.rows(np.concatenate(drawn))

    def _begin(self, epoch: int, cursor: int = 0) -> None:
        self._epoch, self._cursor = epoch, cursor
        count = self._windows.num_windows
        self._order = permutation(count, self._seed, epoch) if self._shuffle else np.arange(count)

    def skip(self, num_batches: int) -> None:
        """Move the position on by this many batches without making them."""
        self.skip_windows(num_batches * self._batch_size)

    def skip_windows(self, count: int) -> None:
        epoch, cursor = divmod(self.num_drawn + count, self._windows.num_windows)
        if epoch != self._epoch:  # else the order stays, which takes long to compute
            self._begin(epoch)
        self._cursor = cursor


class HeldOut:
    """Divides held-out data into numbered batches: every window of every source once, unshuffled.

    A batch holds windows of one source. The last batch of a source may have fewer rows than the others.
    """

    def __init__(
        self, sources: Sequence[Windows], *, batch_size: int, micro_batch_size: int, starts: Sequence[int] = ()
    ) -> None:
        """Divide the windows of all sources into batches of `batch_size` rows, a multiple of `micro_batch_size`.

        Rows without tokens fill the last micro-batch of a source.

        starts: windows at the start of each source that are left out; empty: none.
        """
        self._sources = sources
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._starts = starts or (0,) * len(sources)
        counts = (source.num_windows - start for source, start in zip(sources, self._starts, strict=True))
        self._ends = list(accumulate(-(-count // batch_size) for count in counts))

    @property
    def num_batches(self) -> int:
        return self._ends[-1]

    @property
    def joins_documents(self) -> bool:
        return any(source.joins_documents for source in self._sources)

    def source_of(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def batch(self, index: int) -> Batch:
        """Return batch `index`, from 0 to num_batches - 1. Its number of rows is a multiple of the micro-batch size."""
        source = self._sources[self.source_of(index)]
        rows = source.rows(np.array(self.rows_of(index)))
        num_pads, seq_len = -len(rows.ids) % self._micro_batch_size, rows.ids.shape[1] - 1
        pads = Rows.of_pads(num_pads, seq_len, rows.logprobs.dtype, rows.columns.shape[2])
        whole = Rows(*(np.concatenate(parts) for parts in zip(*[rows, pads], strict=True)))
        return assemble(whole, **BatchKind.of(source)._asdict())

    def places(self, index: int) -> NDArray[np.int64]:
        """Return the index of each target of a batch among the tokens of its source, [rows, seq_len]; -1 for a pad.

        Rows that fill the last micro-batch are left out.
        """
        source = self._sources[self.source_of(index)]
        return _divided(source.places(np.array(self.rows_of(index))), source.row_parts)[:, 1:]

    def rows_of(self, index: int) -> range:
        """Return the windows of a batch among those of its source."""
        number = self.source_of(index)
        before = self._ends[number - 1] if number else 0
        first = self._starts[number] + (index - before) * self._batch_size
        return range(first, min(first + self._batch_size, self._sources[number].num_windows))


class BatchKind(NamedTuple):
    """Says what the batches of windows have, as arguments of `assemble`."""

    weighted: bool
    referenced: bool
    documents_per_record: int
    columns: tuple[str, ...]
    row_parts: int
    labelled: bool

    @staticmethod
    def of(windows: Windows) -> BatchKind:
        corpus = windows.corpus
        return BatchKind(
            corpus.weighted, windows.logprobs is not None, windows.documents_per_record, tuple(corpus.columns),
            windows.row_parts, windows.labelled,
        )  # fmt: skip


def assemble(
    rows: Rows, *, weighted: bool, referenced: bool = False, documents_per_record: int = 0,
    columns: Sequence[str] = (), row_parts: int = 1, labelled: bool = False,
) -> Batch:  # fmt: skip
    """Return windows as inputs and targets. A target is -100 if it is a pad, weighs 0, or is in another document.

    weighted: whether tokens may weigh other than 0 and 1, so that the batch has loss weights.
    referenced: whether the windows have log-probabilities of a reference, or records of a teacher.
    documents_per_record: as for `cut`; if not 0, the batch has the number of documents.
    columns: names of the windows' columns. That of advantages has the reward at a document's first token.
    row_parts: number of rows that each window is divided into.
    labelled: as for `cut`.
    """
    if labelled:  # a row holds two windows
        own, others = (Rows(*half) for half in zip(*(np.split(part, 2, axis=1) for part in rows), strict=True))
        batch, mismatched = (
            assemble(half, weighted=weighted, referenced=referenced, documents_per_record=documents_per_record)
            for half in (own, others)
        )
        labels = np.where(batch.targets == IGNORED, WEIGHT_TYPE.type(0), own.loss_weights[:, 1:])
        return dataclasses.replace(batch, columns={LABELS: labels}, mismatched=mismatched)
    num_documents = int((rows.documents.max(axis=1) + 1).sum())
    ids, documents, loss_weights, logprobs, numbers = (_divided(values, row_parts) for values in rows)
    inputs, real = documents[:, :-1], documents[:, :-1] >= 0
    weights = np.where(real & (inputs == documents[:, 1:]), loss_weights[:, 1:], WEIGHT_TYPE.type(0))
    supervised = weights != 0
    positions = _positions(inputs)
    begins = real & (positions == 0)
    margins = np.where(begins, loss_weights[:, :-1], WEIGHT_TYPE.type(0))
    is_packed = (real[:, 1:] & (positions[:, 1:] == 0)).any()
    of_targets = {name: np.where(supervised, numbers[:, 1:, i], WEIGHT_TYPE.type(0)) for i, name in enumerate(columns)}
    reference = logprobs[:, 1:].copy()
    reference[~supervised] = np.zeros((), reference.dtype)
    of_teacher = reference.dtype.names is not None
    return Batch(
        input_ids=np.ascontiguousarray(ids[:, :-1]),
        targets=np.where(supervised, ids[:, 1:], IGNORED),
        positions=positions if is_packed else None,
        num_supervised=int(supervised.sum()),
        num_tokens=int(real.sum()),
        sum_squared_lengths=int((2 * positions + 1)[real].sum()),  # a document of n inputs has 1 + 3 + … + (2n - 1)
        loss_weights=weights if weighted and not documents_per_record else None,
        real=real,
        reference_logprobs=reference if referenced and not of_teacher else None,
        teacher=(reference["ids"].copy(), reference["logprobs"].copy()) if of_teacher else None,
        columns=of_targets | ({MARGINS: margins} if documents_per_record == 2 and margins.any() else {}),
        num_documents=num_documents if documents_per_record else None,
        rewards=numbers[:, :-1, columns.index(ADVANTAGE)][begins] if ADVANTAGE in columns else None,
        row_parts=row_parts,
    )


def _divided(values: NDArray[Any], row_parts: int) -> NDArray[Any]:
    """Return rows as `row_parts` rows each. values: [rows, columns, …]."""
    num_rows, num_columns, *rest = values.shape
    return values.reshape(num_rows * row_parts, num_columns // row_parts, *rest)


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each token the number of tokens before it in its row and document, [rows, columns]."""
    index = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)


def permutation(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of windows in an epoch: window i sorted by splitmix64(i ^ splitmix64_chain(seed, epoch)).

    This uses only integer arithmetic, so a saved position means the same windows with any version of any library.
    """
    key = np.uint64(splitmix64_chain(seed, epoch))
    return np.argsort(splitmix64(np.arange(num_windows, dtype=np.uint64) ^ key), kind="stable")
