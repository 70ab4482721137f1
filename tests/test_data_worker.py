"""Batches in the order of steps, and where the data stood after each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatrain_ray.config import DataConfig
from megatrain_ray.data_worker import REMEMBERED_STEPS, DataWorker
from tests.tiny import TEXT, VOCAB_SIZE, tiny_batches

DATA = DataConfig(path=str(TEXT), tokenizer="bytes", seq_len=32)


def worker(step: int = 0, position: Mapping[str, Any] | None = None) -> DataWorker:
    return DataWorker(DATA, "bytes", VOCAB_SIZE, 4, step, position)


def test_batches_are_those_of_the_stream() -> None:
    ours = worker()
    for step, batch in enumerate(tiny_batches(3), 1):
        assert torch.equal(ours.batch(step).input_ids, batch.input_ids)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_steps_out_of_order_are_refused_and_draw_nothing(wrong: int) -> None:
    ours = worker()
    ours.batch(1)
    position = ours.position(1)
    with pytest.raises(ValueError, match=f"step {wrong} asked for, the next is 2"):
        ours.batch(wrong)
    assert ours.position(1) == position
    assert torch.equal(ours.batch(2).input_ids, tiny_batches(2)[1].input_ids)


def test_positions_of_steps_behind_are_remembered() -> None:
    """A save of step n asks for n's position when later batches are drawn already."""
    ours, seen = worker(), {}
    for step in range(1, REMEMBERED_STEPS + 3):
        ours.batch(step)
        seen[step] = ours.position(step)
    assert [seen[step]["cursor"] for step in (1, 2, 3)] == [4, 8, 12]
    last = REMEMBERED_STEPS + 2
    for step in range(last - REMEMBERED_STEPS + 1, last + 1):
        assert ours.position(step) == seen[step]
    with pytest.raises(KeyError):
        ours.position(last - REMEMBERED_STEPS)


def test_it_continues_at_a_position() -> None:
    ours = worker()
    for step in (1, 2):
        ours.batch(step)
    again = worker(2, ours.position(2))
    assert again.position(2) == ours.position(2)
    with pytest.raises(ValueError, match="the next is 3"):
        again.batch(1)
    for step in (3, 4):
        assert torch.equal(again.batch(step).input_ids, ours.batch(step).input_ids)
        assert again.position(step) == ours.position(step)
