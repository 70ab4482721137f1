"""Makes pairs of random answers, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import BatchStream
from megatrain_ray.io.batching.windows import cut
from tests.support.reference import load_model
from tests.support.texts import corpus_of
from tests.support.tiny import VOCAB_SIZE, as_tensors, build_tiny


class Pair(NamedTuple):
    """Holds ids of a prompt and of two answers."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


def random_pairs(count: int, most_prompt: int = 4) -> Iterator[Pair]:
    """Yield pairs with prompts of 1 to `most_prompt` tokens and answers of 1 to 9, always the same."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        lengths = generator.integers(1, (most_prompt + 1, 10, 10)).tolist()
        yield Pair(*(generator.integers(0, 256, length).tolist() for length in lengths))


def margin_of(number: int) -> float:
    """Return a margin for the pair of this number: 0, 0.5 or -0.25."""
    return (0.0, 0.5, -0.25)[number % 3]


def pair_batches(
    pairs: Iterator[Pair], num_batches: int, *, packing: bool, seq_len: int = 40, batch_size: int = 4
) -> list[Batch]:
    """Return batches of so many rows, as a run makes them in the order of the pairs."""
    documents, weights = [], []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            documents.append([*pair.prompt, *answer])
            weights.append((np.arange(len(documents[-1])) >= len(pair.prompt)).astype(np.float32))
        weights[-2][0], weights[-1][0] = pair.margin, 0
    corpus = replace(corpus_of(*documents), loss_weights=np.concatenate(weights))
    windows = cut(corpus, seq_len=seq_len, packing=packing, vocab_size=VOCAB_SIZE, documents_per_record=2)
    stream = BatchStream(windows, batch_size=batch_size, shuffle=False, seed=0)
    return [as_tensors(stream.next_batch()) for _ in range(num_batches)]


def referenced(folder: Path, batches: Sequence[Any]) -> list[Batch]:
    """Return batches with log-probabilities by a tiny model of other weights, which is written to `folder`."""
    model = load_model(build_tiny(folder, seed=1), torch.float32).eval()
    found = []
    for batch in batches:
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        mismatched = None if batch.mismatched is None else referenced(folder, [batch.mismatched])[0]
        logprobs = -losses.view(batch.targets.shape)
        found.append(replace(batch, reference_logprobs=logprobs, mismatched=mismatched))
    return found


def labelled_batches(
    pairs: Iterator[Pair], num_batches: int, *, packing: bool, seq_len: int = 40, batch_size: int = 4
) -> list[Batch]:
    """Return batches of the chosen answers, of which those with an odd rejected one are labelled bad.

    Each prompt is mismatched with the answer before it among `batch_size`, the first one with the last, as in TRL.
    """
    documents, weights, records = [], [], list(pairs)
    for index, pair in enumerate(records):
        group = index // batch_size * batch_size
        other = records[group + (index - group - 1) % len(records[group : group + batch_size])]
        sign = 1.0 if is_good(pair) else -1.0
        for answer, weight in ((pair.chosen, sign), (other.chosen, 1.0)):
            documents.append([*pair.prompt, *answer])
            weights.append(np.where(np.arange(len(documents[-1])) >= len(pair.prompt), weight, 0.0))
    corpus = replace(corpus_of(*documents), loss_weights=np.concatenate(weights).astype(np.float32))
    windows = cut(corpus, seq_len=seq_len, packing=packing, vocab_size=VOCAB_SIZE, labelled=True)
    stream = BatchStream(windows, batch_size=batch_size, shuffle=False, seed=0)
    return [as_tensors(stream.next_batch()) for _ in range(num_batches)]


def is_good(pair: Pair) -> bool:
    return len(pair.rejected) % 2 == 0
