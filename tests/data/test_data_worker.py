"""Batches in the order of steps, and where the data stood after each of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import REMEMBERED_STEPS, DataWorker, open_stream
from megatrain_ray.errors import ConfigError
from tests.support.texts import tokens_of, write
from tests.support.tiny import TEXT, VOCAB_SIZE, tiny_batches

DATA = DataConfig(path=str(TEXT), tokenizer="bytes", seq_len=32)


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[Path, ...]:
    return tokens_of(DATA, tmp_path)


def worker(tokens: tuple[Path, ...], step: int = 0, position: Mapping[str, Any] | None = None) -> DataWorker:
    return DataWorker(DATA, tokens, VOCAB_SIZE, 4, step, position)


def test_batches_are_those_of_the_stream(tokens: tuple[Path, ...]) -> None:
    ours = worker(tokens)
    for step, batch in enumerate(tiny_batches(3), 1):
        assert np.array_equal(ours.batch(step).input_ids, batch.input_ids)


@pytest.mark.parametrize("asked", [(1, 2, 2, 3), (1, 2, 3, 1, 2), (3,), (2, 5, 3), (1, 2, 3, 2)])
def test_a_step_has_the_same_batch_whatever_was_asked_before(tokens: tuple[Path, ...], asked: tuple[int, ...]) -> None:
    """By who makes a step once more, and by who asked another data process for those before."""
    ours, right = worker(tokens), tiny_batches(6)
    for step in asked:
        batch = ours.batch(step)
        assert np.array_equal(batch.input_ids, right[step - 1].input_ids)
        assert ours.position_after(step)["cursor"] == 4 * step
    assert np.array_equal(ours.batch(asked[-1] + 1).input_ids, right[asked[-1]].input_ids)


def test_several_readers_a_step_apart_get_the_same_batches_and_each_is_drawn_once(tokens: tuple[Path, ...]) -> None:
    ours = DataWorker(DATA, tokens, VOCAB_SIZE, 4, 0, None, num_readers=2)
    right = worker(tokens)
    asked = [1, 2, 1, 3, 2, 3]
    batches = [ours.batch(step) for step in asked]
    for step, batch in zip(asked, batches, strict=True):
        assert np.array_equal(batch.input_ids, right.batch(step).input_ids)
    for first, second in ((0, 2), (1, 4), (3, 5)):
        assert batches[first] is batches[second], "or every reader seeks the stream to and fro"
    assert np.array_equal(ours.batch(1).input_ids, batches[0].input_ids), "one that makes a step once more"


def test_steps_that_are_not_remembered_have_the_same_batch_and_position(tokens: tuple[Path, ...]) -> None:
    ours, far = worker(tokens), 2 * REMEMBERED_STEPS + 4
    batches = {step: ours.batch(step) for step in range(1, REMEMBERED_STEPS + 3)}
    positions = {step: ours.position_after(step) for step in batches}
    for step in (1, 2, REMEMBERED_STEPS, 3, far, 4):
        again = worker(tokens)
        batch, position = again.batch(step), again.position_after(step)
        assert np.array_equal(ours.batch(step).input_ids, batch.input_ids)
        assert np.array_equal(batches.get(step, batch).input_ids, batch.input_ids)
        assert ours.position_after(step) == positions.get(step, position) == position


def test_it_continues_at_a_position(tokens: tuple[Path, ...]) -> None:
    ours = worker(tokens)
    again = worker(tokens, 2, ours.position_after(2))
    for ask in (again.batch, again.position_after):
        with pytest.raises(ValueError, match="this process knows of steps after 2"):
            ask(1)
    for step in (3, 4):
        assert np.array_equal(ours.batch(step).input_ids, again.batch(step).input_ids)
        assert ours.position_after(step) == again.position_after(step)


def test_weighted_sources_come_in_their_shares_and_go_on_anywhere(tmp_path: Path) -> None:
    write(tmp_path, a="a" * 90, b_jsonl='{"text": "bbbbbb"}\n' * 9)
    sources = [{"path": str(tmp_path / "a.txt"), "weight": 3}, {"path": str(tmp_path / "*.jsonl"), "weight": 1}]
    data = DataConfig.model_validate({"path": sources, "tokenizer": "bytes", "seq_len": 5, "packing": False})
    tokens = tokens_of(data, tmp_path)
    ours = DataWorker(data, tokens, VOCAB_SIZE, 7, 0, None)
    batches = [ours.batch(step) for step in range(1, 9)]
    drawn = np.concatenate([batch.input_ids for batch in batches])
    assert int((drawn[:, 0] == ord("b")).sum()) == 7 * 8 // 4
    again = DataWorker(data, tokens, VOCAB_SIZE, 7, 3, ours.position_after(3))
    assert np.array_equal(np.concatenate([again.batch(step).input_ids for step in range(4, 9)]), drawn[21:])
    assert [set(position) for position in ours.position_after(8)["sources"]] == [
        {"epoch", "cursor", "num_tokens", "crc32"}
    ] * 2


def test_positions_begin_again_in_each_document_of_a_row(tmp_path: Path) -> None:
    text = write(tmp_path, a="abc", b="defgh")
    data = DataConfig(path=text, tokenizer="bytes", seq_len=8, shuffle=False)
    stream = open_stream(data, tokens_of(data, tmp_path), 257, batch_size=1)
    assert stream.joins_documents
    batch = stream.next_batch()
    assert batch.input_ids.tolist() == [[*b"abc", 256, *b"defg"]]
    assert batch.targets.tolist() == [[*b"bc", 256, -100, *b"efgh"]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


def test_tokens_that_are_gone_are_named(tokens: tuple[Path, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokens of .*tinyshakespeare.txt are not in .*elsewhere"):
        worker((tmp_path / "elsewhere",))
