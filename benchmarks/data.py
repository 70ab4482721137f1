"""Measures pre-training data: how fast text is tokenised into the cache, and how fast batches are made of it.

    python -m benchmarks.data OUT.json [--megabytes 100]

The text is made of the lines of examples/data/tinyshakespeare.txt in random order, with random words among them. A BPE
tokenizer of 16,384 ids is trained on a part of it. Each case is tokenised in a process of its own. `cores` is CPU
seconds divided by seconds; `extra_mib` is the peak of memory beyond what the process held before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import zstandard
from tokenizers import models, pre_tokenizers, trainers

from benchmarks.scratch import memory
from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.io.batching.batch_stream import BatchStream
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.batching.windows import cut

SHAKESPEARE = Path(__file__).parent.parent / "examples" / "data" / "tinyshakespeare.txt"
END = "<|endoftext|>"
VOCAB_SIZE = 16_384
SEQ_LEN = 1024
BATCH_SIZES = (16, 64)
NUM_BATCHES = 50


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path)
    options.add_argument("--megabytes", type=int, default=100)
    arguments = options.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder, arguments.megabytes * 10**6)
        train_tokenizer(folder)
        cases = [
            alone(folder, file, tokenizer)
            for file in ("one.txt", "many.jsonl.zst")
            for tokenizer in ("bytes", str(folder / "bpe"))
        ]
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "tokenizers": tokenizers.__version__}
    report = {"machine": machine, "load_average": os.getloadavg(), "megabytes": arguments.megabytes, "cases": cases}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def write_texts(folder: Path, num_bytes: int) -> None:
    """Write the same text as one document, and as many documents of a few hundred characters."""
    rng = random.Random(0)
    lines = [line for line in SHAKESPEARE.read_text().splitlines() if line]
    with (
        (folder / "one.txt").open("w") as one,
        zstandard.open(folder / "many.jsonl.zst", "wt") as many,
    ):
        while one.tell() < num_bytes:
            words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(3)]
            text = "\n".join([*rng.choices(lines, k=rng.randint(1, 20)), " ".join(words)])
            one.write(text + "\n")
            many.write(json.dumps({"text": text}) + "\n")


def train_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    with (folder / "one.txt").open() as file:
        tokenizer.train_from_iterator([file.read(8_000_000)], trainer)
    (folder / "bpe").mkdir()
    tokenizer.save(str(folder / "bpe" / "tokenizer.json"))
    (folder / "bpe" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def alone(folder: Path, file: str, tokenizer: str) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, folder, file, tokenizer).result()


def measure(folder: Path, file: str, tokenizer: str) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    data = DataConfig(path=str(folder / file), seq_len=SEQ_LEN, packing=file == "one.txt")
    before, start_s, start_cpu_s = memory("VmRSS"), time.monotonic(), time.process_time()
    tokens = tokenize(data, tokenizer, VOCAB_SIZE, folder)
    seconds, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    extra_bytes = memory("VmHWM") - before
    corpus = open_corpus(file, tokens[0], VOCAB_SIZE)
    packed = cut(corpus, seq_len=SEQ_LEN, packing=True, vocab_size=VOCAB_SIZE)
    return {
        "file": file,
        "tokenizer": Path(tokenizer).name,
        "documents": corpus.num_documents,
        "tokens": corpus.tokens.size,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(corpus.tokens.size / seconds),
        "text_mb_per_s": round((folder / "one.txt").stat().st_size / seconds / 1e6, 2),
        "cpu_s": round(cpu_s, 2),
        "cores": round(cpu_s / seconds, 2),
        "extra_mib": round(extra_bytes / 2**20),
        "batches_tokens_per_s": {
            size: rate(DataWorker(data, tokens, VOCAB_SIZE, size, 0, None)) for size in BATCH_SIZES
        },
        "packed_batches_tokens_per_s": {
            size: rate(BatchStream(packed, batch_size=size, shuffle=True, seed=0)) for size in BATCH_SIZES
        },
    }


def rate(source: DataWorker | BatchStream) -> int:
    """Return the tokens per second of the median batch; padding is not counted."""
    rates = []
    for step in range(1, NUM_BATCHES + 1):
        start_s = time.perf_counter()
        batch = source.batch(step) if isinstance(source, DataWorker) else source.next_batch()
        rates.append(batch.num_tokens / (time.perf_counter() - start_s))
    return round(statistics.median(rates))


if __name__ == "__main__":
    main()
