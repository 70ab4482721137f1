"""Held-out data: every document once and to its end, in batches by number; what is wrong is said of its own keys."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_sources import naming_held_out
from megatrain_ray.data.data_worker import DataWorker, HeldOutData
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import HeldOut
from megatrain_ray.io.batching.windows import Windows, cut
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.texts import END, corpus_of, tokens_of, write

SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=9).filter(lambda sizes: max(sizes) > 1)
VOCAB_SIZE = 1 << 16


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents in which no token stands twice."""
    return [[1000 + 100 * index + at for at in range(size)] for index, size in enumerate(sizes)]


def whole_windows(documents: list[list[int]], seq_len: int, *, packing: bool) -> Windows:
    return cut(corpus_of(*documents), seq_len=seq_len, packing=packing, vocab_size=VOCAB_SIZE, whole=True)


def all_of(held_out: HeldOut) -> list[Batch]:
    return [held_out.batch(index) for index in range(held_out.num_batches)]


def learned(batches: list[Batch]) -> list[tuple[int, int]]:
    """(input, target) of every supervised token, in order."""
    pairs = []
    for batch in batches:
        there = batch.targets != IGNORED
        assert batch.num_supervised == int(there.sum())
        pairs += list(zip(batch.input_ids[there].tolist(), batch.targets[there].tolist(), strict=True))
    return pairs


@settings(deadline=None, derandomize=True)
@given(SIZES, st.integers(1, 7), st.booleans(), st.integers(1, 3), st.integers(1, 3))
def test_every_target_of_every_document_comes_once(
    sizes: list[int], seq_len: int, packing: bool, micro_batch_size: int, accumulate: int
) -> None:
    """All but the first token of a window and of a document."""
    documents = numbered(sizes)
    packing = packing and len(documents) > 1
    joined = [token for document in documents for token in [*document, END]][:-1]
    rows = [joined] if packing else documents
    expected = []
    for row in rows:
        for start in range(0, len(row), seq_len + 1):
            part = row[start : start + seq_len + 1]
            expected += [(a, b) for a, b in pairwise(part) if a != END]
    batch_size = micro_batch_size * accumulate
    windows = whole_windows(documents, seq_len, packing=packing)
    batches = all_of(HeldOut([windows], batch_size=batch_size, micro_batch_size=micro_batch_size))
    assert learned(batches) == expected
    assert all(len(batch.input_ids) == batch_size for batch in batches[:-1])
    assert len(batches[-1].input_ids) % micro_batch_size == 0
    assert len(batches) == -(-windows.num_windows // batch_size)


@settings(deadline=None, derandomize=True)
@given(SIZES, st.integers(1, 7), st.booleans())
def test_a_trainings_windows_are_the_first_of_each_document(sizes: list[int], seq_len: int, packing: bool) -> None:
    """The last short windows of held-out data change nothing else."""
    documents = numbered(sizes)
    whole = whole_windows(documents, seq_len, packing=packing)
    usual = cut(corpus_of(*documents), seq_len=seq_len, packing=packing, vocab_size=VOCAB_SIZE)
    ours, theirs = (windows.rows(np.arange(windows.num_windows)).ids.tolist() for windows in (whole, usual))
    assert [row for row in ours if row in theirs] == theirs
    assert len(ours) - len(theirs) <= (1 if packing and len(documents) > 1 else len(documents))


def test_sources_come_one_after_the_other_and_rows_without_tokens_fill_micro_batches() -> None:
    sources = [whole_windows([[1, 2, 3, 4, 5, 6, 7]], 2, packing=False), whole_windows([[8, 9]], 2, packing=False)]
    held_out = HeldOut(sources, batch_size=2, micro_batch_size=2)
    assert held_out.num_batches == 2
    assert [held_out.source_of(index) for index in range(2)] == [0, 1]
    first, second = all_of(held_out)
    assert first.input_ids.tolist() == [[1, 2], [4, 5]]
    assert second.input_ids.tolist() == [[8, 9], [0, 0]]
    assert second.targets.tolist() == [[9, IGNORED], [IGNORED, IGNORED]]
    assert (second.num_supervised, second.num_tokens, second.positions) == (1, 2, None)


def of(folder: Path, **data: Any) -> tuple[DataConfig, HeldOutData]:
    """Return the data of a training, and its held-out data."""
    config = DataConfig.model_validate({"tokenizer": "bytes", **data})
    assert config.held_out is not None
    with naming_held_out(config.held_out):
        tokens = tokenize(config.held_out, "bytes", 257, folder)
    return config, HeldOutData(config.held_out, tokens, 257, 4, 2)


def test_the_data_process_hands_them_out_by_number_beside_the_training(tmp_path: Path) -> None:
    text = write(tmp_path, a="abcdefgh")
    (tmp_path / "held").mkdir()
    config, held_out = of(
        tmp_path, path=text, eval_path=write(tmp_path / "held", x="uvwxyz" * 9, y="short"), seq_len=4, shuffle=True
    )
    worker = DataWorker(config, tokens_of(config, tmp_path), 257, 1, 0, None, held_out)
    expected = all_of(held_out.open())
    for index in (1, 0, 2, 1):
        assert np.array_equal(worker.held_out_batch(index).input_ids, expected[index].input_ids)
        if index == 0:
            assert worker.batch(1).input_ids.tolist() == [[*b"abcd"]]
    assert held_out.open().joins_documents
    assert held_out.weights == (1.0,)


def test_chats_are_cut_and_masked_as_those_of_the_training(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * n}]}
        for n in (3, 20, 400)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = str(tmp_path / "c.jsonl")
    config, held_out = of(tmp_path, kind="sft", path=path, eval_path=path, seq_len=120, truncation="drop")
    assert tokens_of(config, tmp_path) == held_out.tokens, "the same chats are tokenised once"
    targets = [bytes(t for t in row.tolist() if 0 <= t < 256) for b in all_of(held_out.open()) for row in b.targets]
    assert b"a" * 3 in b"".join(targets)
    assert b"a" * 20 in b"".join(targets)
    assert b"q" not in b"".join(targets)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eval_path": "gone.txt"}, "data.eval_path: no such file: gone.txt (relative paths start at"),
        ({"eval_path": [{"path": "gone.txt", "weight": 2}]}, "data.eval_path: no such file: gone.txt (relative"),
        ({"eval_path": "one.txt"}, "data.eval_path: nothing to learn in "),
        ({"eval_path": "c.jsonl", "kind": "sft", "eval_dataset": "x"},
         "data.eval_path: data.eval_dataset goes with one dataset_info.json and nothing else"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_of_its_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, one="x", c_jsonl="{}")
    with pytest.raises(ConfigError) as caught:
        of(tmp_path, path="one.txt", seq_len=4, **data)[1].open()
    assert str(caught.value).startswith(message)
