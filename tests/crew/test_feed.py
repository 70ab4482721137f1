"""Batches whose data process dies: they are asked for again, of the one that follows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from megatrain_ray.crew import actors
from megatrain_ray.crew.actors import BatchFeed
from megatrain_ray.errors import NotPreparedError

WAIT_S = 60.0


def data_process(name: str, *, lives: bool = True) -> Any:
    """Return a stand-in for an actor's handle, whose batches are their number and its name."""

    async def batch(number: int) -> str:
        if not lives:
            raise RayActorError
        return f"{number} of {name}"

    method = SimpleNamespace(remote=batch)
    return SimpleNamespace(batch=method, held_out_batch=method)


async def test_a_batch_comes_from_the_next_data_process() -> None:
    """Both kinds, asked for before anybody knew."""
    feed = BatchFeed(data_process("the first", lives=False))
    death = asyncio.ensure_future(feed.until_it_dies())
    asked = [asyncio.ensure_future(feed.batch(3)), asyncio.ensure_future(feed.held_out_batch(1))]
    async with asyncio.timeout(WAIT_S):
        await death
        assert not any(task.done() for task in asked)
        await feed.take(data_process("the second", lives=False))  # dies as well
        await feed.until_it_dies()
        await feed.take(data_process("the third"))
        assert await asyncio.gather(*asked) == ["3 of the third", "1 of the third"]


async def test_nobody_is_told_of_the_death_of_who_is_not_asked() -> None:
    feed = BatchFeed(data_process("the only one"))
    assert await feed.batch(1) == "1 of the only one"  # type: ignore[comparison-overlap]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await feed.until_it_dies()


async def test_a_batch_whose_data_are_not_there_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ASK_AGAIN_S", 0.0)
    errors: list[Exception] = [NotPreparedError("wait")] * 3

    async def batch(number: int) -> str:
        if errors:
            raise RayTaskError("batch", "", errors.pop())
        return f"batch {number}"

    feed = BatchFeed(SimpleNamespace(batch=SimpleNamespace(remote=batch)))
    assert await feed.batch(7) == "batch 7"  # type: ignore[comparison-overlap]
    errors.append(ValueError("of its own"))
    with pytest.raises(RayTaskError):
        await feed.batch(8)
