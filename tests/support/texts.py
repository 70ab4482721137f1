"""Makes corpora in memory, and token folders as a run makes them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.io.batching.corpus import Corpus, Fingerprint

END = 256


def corpus_of(*documents: bytes | Sequence[int], name: str = "texts", end_of_document: int | None = END) -> Corpus:
    """Return a corpus of documents given as ids or bytes, with ids of 2 bytes."""
    arrays = [np.array(list(document), np.uint16) for document in documents]
    tokens = np.concatenate([*arrays, np.empty(0, np.uint16)])
    lengths = np.array([array.size for array in arrays], np.int64)
    crc32 = zlib.crc32(lengths.tobytes(), zlib.crc32(tokens.tobytes()))
    return Corpus(name, tokens, lengths, Fingerprint(tokens.size, crc32), end_of_document)


def write(folder: Path, **texts: str | bytes) -> str:
    """Write files of this content, and return their glob.

    texts: content by name; `_` in a name stands for a dot, and a name without one gets .txt.
    """
    for name, text in texts.items():
        file = folder / (name.replace("_", ".") if "_" in name else f"{name}.txt")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / "*.*")


def tokens_of(data: DataConfig, run_dir: Path, vocab_size: int = 257) -> tuple[Path, ...]:
    """Make token folders as the driver makes them, with the tokenizer that `data` names."""
    assert data.tokenizer is not None
    return tokenize(data, data.tokenizer, vocab_size, run_dir)
