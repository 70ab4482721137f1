"""Puts sampled answers into batches, of which a run takes log-probabilities before it learns from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.config.groups import DataConfig
from megatrain_ray.io.batching.batch_stream import HeldOut
from megatrain_ray.io.batching.windows import cut
from megatrain_ray.io.tokens.token_files import Corpus, Fingerprint, Logprobs


class SampledAnswer(NamedTuple):
    """Holds the ids of a prompt, and of an answer to it."""

    prompt: Sequence[int]
    completion: Sequence[int]


class AnswerRows:
    """Cuts answers into rows and batches like those of updates, and finds the numbers of each answer in these."""

    def __init__(
        self,
        answers: Sequence[SampledAnswer],
        data: DataConfig,
        vocab_size: int,
        *,
        batch_size: int,
        micro_batch_size: int,
    ) -> None:
        """Cut them. batch_size, micro_batch_size: rows, as for HeldOut. data: of the prompts."""
        lengths = np.array([len(answer.prompt) + len(answer.completion) for answer in answers])
        self._starts = [start + len(answer.prompt) for start, answer in zip(_starts(lengths), answers, strict=True)]
        self._ends = [*accumulate(lengths.tolist())]
        learned = np.zeros(int(lengths.sum()), np.bool_)
        for start, end in zip(self._starts, self._ends, strict=True):
            learned[start:end] = True
        tokens = np.concatenate([np.array([*answer.prompt, *answer.completion], np.uint32) for answer in answers])
        corpus = Corpus("answers", tokens, lengths, Fingerprint(tokens.size, 0), None, loss_weights=learned)
        windows = cut(
            corpus, seq_len=data.seq_len, packing=data.joins_documents, vocab_size=vocab_size, whole=True,
            documents_per_record=1,
        )  # fmt: skip
        self.batches = HeldOut([windows], batch_size=batch_size, micro_batch_size=micro_batch_size)
        self._num_tokens = tokens.size

    def empty(self) -> Logprobs:
        """Return a number for each token of all answers and prompts, to be `put` there."""
        return np.zeros(self._num_tokens, np.float32)

    def put(self, values: Logprobs, index: int, of_batch: NDArray[np.float32]) -> None:
        """Put the numbers of a batch's targets, [rows, seq_len], where `values` has them."""
        places = self.batches.places(index)
        values[places[places >= 0]] = of_batch[: len(places)][places >= 0]

    def of_answers(self, values: Logprobs) -> Iterator[list[float]]:
        """Yield the numbers of each answer's tokens."""
        for start, end in zip(self._starts, self._ends, strict=True):
            yield values[start:end].tolist()


def _starts(lengths: NDArray[np.int64]) -> list[int]:
    found: list[int] = (np.cumsum(lengths) - lengths).tolist()
    return found
