"""Makes pairs of random answers, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatrain_ray.io.batching.batch_stream import Batch, BatchStream
from megatrain_ray.io.batching.windows import cut
from tests.support.texts import corpus_of
from tests.support.tiny import VOCAB_SIZE, as_tensors


class Pair(NamedTuple):
    """Holds ids of a prompt and of two answers."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def random_pairs(count: int, most_prompt: int = 4) -> Iterator[Pair]:
    """Yield pairs with prompts of 1 to `most_prompt` tokens and answers of 1 to 9, always the same."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        lengths = generator.integers(1, (most_prompt + 1, 10, 10)).tolist()
        yield Pair(*(generator.integers(0, 256, length).tolist() for length in lengths))


def pair_batches(
    pairs: Iterator[Pair], num_batches: int, *, packing: bool, seq_len: int = 40, batch_size: int = 4
) -> list[Batch]:
    """Return batches of so many rows, as a run makes them in the order of the pairs."""
    documents, weights = [], []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            documents.append([*pair.prompt, *answer])
            weights.append(np.arange(len(documents[-1])) >= len(pair.prompt))
    corpus = replace(corpus_of(*documents), loss_weights=np.concatenate(weights))
    windows = cut(corpus, seq_len=seq_len, packing=packing, vocab_size=VOCAB_SIZE, in_pairs=True)
    stream = BatchStream(windows, batch_size=batch_size, shuffle=False, seed=0)
    return [as_tensors(stream.next_batch()) for _ in range(num_batches)]
