"""Makes random rollouts, and batches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import BatchStream
from megatrain_ray.io.batching.windows import cut
from megatrain_ray.io.tokens.token_files import ADVANTAGE, SAMPLER_LOGPROB
from tests.support.texts import corpus_of
from tests.support.tiny import VOCAB_SIZE, as_tensors


class Sampled(NamedTuple):
    """Holds an answer: ids of a prompt and of the answer, and for each of the latter a log-probability and 0 or 1."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    mask: list[int]
    advantage: float


def random_rollouts(count: int) -> Iterator[Sampled]:
    """Yield rollouts with prompts of 1 to 4 tokens and answers of 1 to 9, always the same.

    A tiny model with random weights gives each of its tokens a log-probability of about -5.8.
    """
    generator = np.random.default_rng(0)
    for number in range(count):
        lengths = generator.integers(1, (5, 10)).tolist()
        prompt, answer = (generator.integers(0, 256, length).tolist() for length in lengths)
        logprobs = (-5.8 + 0.3 * generator.standard_normal(len(answer))).astype(np.float32).tolist()
        mask = [1, *generator.integers(0, 2, len(answer) - 1).tolist()] if number % 3 == 0 else [1] * len(answer)
        yield Sampled(prompt, answer, logprobs, mask, float(np.float32(generator.standard_normal())))


def rollout_batches(
    rollouts: Sequence[Sampled], num_batches: int, *, packing: bool, seq_len: int = 40, batch_size: int | None = None
) -> list[Batch]:
    """Return batches of so many rows, or of all, as a run makes them in the order of the rollouts."""
    corpus = corpus_of(*([*rollout.prompt, *rollout.answer] for rollout in rollouts))
    columns: dict[str, list[float]] = {ADVANTAGE: [], SAMPLER_LOGPROB: []}
    learned: list[int] = []
    for rollout in rollouts:
        before = [0] * len(rollout.prompt)
        learned += before + rollout.mask
        columns[ADVANTAGE] += [*before, *[rollout.advantage] * len(rollout.answer)]
        columns[SAMPLER_LOGPROB] += [*before, *rollout.logprobs]
    corpus = dataclasses.replace(
        corpus,
        loss_weights=np.array(learned, np.bool_),
        columns={name: np.array(values, np.float32) for name, values in columns.items()},
    )
    windows = cut(corpus, seq_len=seq_len, packing=packing, vocab_size=VOCAB_SIZE, documents_per_record=1)
    stream = BatchStream(windows, batch_size=batch_size or windows.num_windows, shuffle=False, seed=0)
    return [as_tensors(stream.next_batch()) for _ in range(num_batches)]
