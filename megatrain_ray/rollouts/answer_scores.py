"""Puts sampled answers into batches, of which a run takes log-probabilities before it learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.rollout_stream import rows_of_answers
from megatrain_ray.io.batching.corpus import Corpus, Fingerprint


class SampledAnswer(NamedTuple):
    """Holds the ids of a prompt, and of an answer to it."""

    prompt: Sequence[int]
    completion: Sequence[int]


class AnswerBatch:
    """Holds the answers of one update in the rows that the update will have, and finds the numbers of each answer."""

    def __init__(
        self, answers: Sequence[SampledAnswer], data: DataConfig, vocab_size: int, micro_batch_size: int
    ) -> None:
        """Put them into rows. The arguments are those of rows_of_answers."""
        parts = [[*answer.prompt, *answer.completion] for answer in answers]
        learned = [np.arange(len(ids)) >= len(answer.prompt) for ids, answer in zip(parts, answers, strict=True)]
        tokens, lengths = np.concatenate(parts).astype(np.uint32), np.array([*map(len, parts)])
        corpus = Corpus("answers", tokens, lengths, Fingerprint(tokens.size, 0), None, np.concatenate(learned))
        self._rows, self._learned = rows_of_answers(corpus, data, vocab_size, micro_batch_size), learned
        self.batch = self._rows.batch(0)

    def of_answers(self, values: NDArray[np.float32]) -> list[list[float]]:
        """Return the numbers of each answer's tokens. values: of the batch's targets, [rows, seq_len]."""
        places = self._rows.places(0)
        of_tokens = np.zeros(sum(map(len, self._learned)), np.float32)
        of_tokens[places[places >= 0]] = values[: len(places)][places >= 0]
        each = np.split(of_tokens, np.cumsum([*map(len, self._learned)])[:-1])
        return [numbers[learned].tolist() for numbers, learned in zip(each, self._learned, strict=True)]
