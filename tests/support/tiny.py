"""Builds tiny Llama models with the same weights everywhere, and fixed batches of the shipped text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import BatchStream
from megatrain_ray.io.batching.corpus import Corpus
from megatrain_ray.io.batching.windows import cut
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.texts import corpus_of

TEXT = Path(__file__).parents[2] / "examples" / "data" / "tinyshakespeare.txt"
VOCAB_SIZE = 257


def build_tiny(
    folder: Path,
    *,
    tied: bool = False,
    attention_dropout: float = 0.0,
    num_layers: int = 3,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    reward: bool = False,
) -> Path:
    """Write a model of 64 hidden units, 4 heads and 2 key-value heads, whose weights depend on nothing but `seed`.

    reward: with a head for scores in place of that for tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(tied, attention_dropout, num_layers, vocab_size, seed, reward).items():
        (folder / name).write_bytes(content)
    return folder


@cache
def _files(
    tied: bool, attention_dropout: float, num_layers: int, vocab_size: int, seed: int, reward: bool
) -> dict[str, bytes]:
    """Return the files of a tiny model by name: building one takes longer than training it for a step."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_dropout=attention_dropout,
        **({"num_labels": 1} if reward else {}),
    )
    model: Any = (LlamaForSequenceClassification if reward else LlamaForCausalLM)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.05 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def tiny_batches(num_batches: int, batch_size: int = 4, seq_len: int = 32) -> list[Batch]:
    """Return the first batches of the shipped text, shuffled with seed 0, as bytes."""
    return text_batches(num_batches, batch_size, seq_len)


def text_batches(num_batches: int, batch_size: int, seq_len: int, *, seed: int = 0) -> list[Batch]:
    windows = cut(_shipped_text(), seq_len=seq_len, packing=True, vocab_size=VOCAB_SIZE)
    stream = BatchStream(windows, batch_size=batch_size, shuffle=True, seed=seed)
    return [as_tensors(stream.next_batch()) for _ in range(num_batches)]


def as_tensors(batch: Batch) -> Any:
    """Return the batch with tensors in place of its arrays, as plain PyTorch takes it (`reference.Sequences`)."""
    arrays: dict[str, Any] = {
        key: torch.from_numpy(value) for key, value in vars(batch).items() if isinstance(value, np.ndarray)
    }
    arrays |= {"teacher": batch.teacher and tuple(map(torch.from_numpy, batch.teacher))}
    arrays |= {"columns": {key: torch.from_numpy(array) for key, array in batch.columns.items()}}
    return replace(batch, mismatched=batch.mismatched and as_tensors(batch.mismatched), **arrays)


def weigh(batch: Batch) -> Batch:
    """Return the batch with a loss weight for each target: mostly 1, and 0 for some, which are not supervised."""
    generator = torch.Generator().manual_seed(batch.targets.sum().item())
    choices = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.3, 2.5])
    weights = choices[torch.randint(len(choices), batch.targets.shape, generator=generator)]
    weights[batch.targets == IGNORED] = 0
    targets = batch.targets.masked_fill(weights == 0, IGNORED)
    return replace(batch, targets=targets, loss_weights=weights, num_supervised=int((weights != 0).sum()))


@cache
def _shipped_text() -> Corpus:
    return corpus_of(TEXT.read_bytes())
