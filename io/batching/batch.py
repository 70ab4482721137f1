"""Puts windows together as the batch of an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.batching.windows import Rows, Windows
from megatrain_ray.io.tokens.image_files import IMAGE, PlacedImage
from megatrain_ray.io.tokens.token_files import ADVANTAGE, IGNORED, WEIGHT_TYPE

MARGINS = "margins"
LABELS = "labels"  # column: 1 at targets of good answers, -1 at those of bad ones


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
    # [batch, seq_len], 1 + the number of the image that an input is part of, 0 if of none; None: there are no images
    image_numbers: NDArray[np.int64] | None = None
    images: tuple[PlacedImage, ...] = ()  # in the order of their tokens

    @property
    def num_image_tokens(self) -> int:
        """Return how many inputs are tokens of images."""
        return 0 if self.image_numbers is None else int(np.count_nonzero(self.image_numbers))

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


class BatchKind(NamedTuple):
    """Says what batches have.

    weighted: whether tokens may weigh other than 0 and 1, so that the batch has loss weights.
    referenced: whether the windows have log-probabilities of a reference, or records of a teacher.
    documents_per_record: as for `cut`; if not 0, the batch has the number of documents.
    columns: names of the windows' columns. That of advantages has the reward at a document's first token.
    row_parts: number of rows that each window is divided into.
    labelled: as for `cut`.
    """

    weighted: bool = False
    referenced: bool = False
    documents_per_record: int = 0
    columns: tuple[str, ...] = ()
    row_parts: int = 1
    labelled: bool = False

    @staticmethod
    def of(windows: Windows) -> BatchKind:
        corpus = windows.corpus
        return BatchKind(
            corpus.weighted, windows.logprobs is not None, windows.documents_per_record, tuple(corpus.columns),
            windows.row_parts, windows.labelled,
        )  # fmt: skip


def assemble(rows: Rows, kind: BatchKind = BatchKind()) -> Batch:  # noqa: B008, it is frozen
    """Return windows as inputs and targets. A target is -100 if it is a pad, weighs 0, or is in another document."""
    if kind.labelled:  # a row holds two windows
        own, others = (Rows(*half) for half in zip(*(np.split(part, 2, axis=1) for part in rows), strict=True))
        batch, mismatched = (assemble(half, kind._replace(labelled=False)) for half in (own, others))
        labels = np.where(batch.targets == IGNORED, WEIGHT_TYPE.type(0), own.loss_weights[:, 1:])
        return dataclasses.replace(batch, columns={LABELS: labels}, mismatched=mismatched)
    num_documents = int((rows.documents.max(axis=1) + 1).sum())
    ids, documents, loss_weights, logprobs, numbers = (divided(values, kind.row_parts) for values in rows)
    inputs, real = documents[:, :-1], documents[:, :-1] >= 0
    weights = np.where(real & (inputs == documents[:, 1:]), loss_weights[:, 1:], WEIGHT_TYPE.type(0))
    supervised = weights != 0
    positions = _positions(inputs)
    begins = real & (positions == 0)
    margins = np.where(begins, loss_weights[:, :-1], WEIGHT_TYPE.type(0))
    is_packed = (real[:, 1:] & (positions[:, 1:] == 0)).any()
    of_targets = {
        name: np.where(supervised, numbers[:, 1:, i], WEIGHT_TYPE.type(0))
        for i, name in enumerate(kind.columns)
        if name != IMAGE
    }
    has_images = IMAGE in kind.columns
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
        loss_weights=weights if kind.weighted and not kind.documents_per_record else None,
        real=real,
        reference_logprobs=reference if kind.referenced and not of_teacher else None,
        teacher=(reference["ids"].copy(), reference["logprobs"].copy()) if of_teacher else None,
        columns=of_targets | ({MARGINS: margins} if kind.documents_per_record == 2 and margins.any() else {}),
        num_documents=num_documents if kind.documents_per_record else None,
        rewards=numbers[:, :-1, kind.columns.index(ADVANTAGE)][begins] if ADVANTAGE in kind.columns else None,
        row_parts=kind.row_parts,
        image_numbers=numbers[:, :-1, kind.columns.index(IMAGE)].astype(np.int64) if has_images else None,
    )


def divided(values: NDArray[Any], row_parts: int) -> NDArray[Any]:
    """Return rows as `row_parts` rows each. values: [rows, columns, …]."""
    num_rows, num_columns, *rest = values.shape
    return values.reshape(num_rows * row_parts, num_columns // row_parts, *rest)


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each token the number of tokens before it in its row and document, [rows, columns]."""
    index = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
