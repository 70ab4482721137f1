"""Holders of arenas: any of them may die but one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arena import ArenaHandle
from megatrain_ray.io.arena_holder import ArenaHolder

SIZES = {"words": 64, "state-0": 5000}


@contextmanager
def closing(*holders: ArenaHolder) -> Iterator[None]:
    try:
        yield
    finally:
        for holder in holders:
            holder.close()


def written(holder: ArenaHolder, name: str, value: int) -> None:
    arena = holder.map(name)
    torch.frombuffer(arena.buffer, dtype=torch.uint8)[0] = value
    arena.close()


def first_byte(holder: ArenaHolder, name: str) -> int:
    arena = holder.map(name)
    value = arena.buffer[0]
    arena.close()
    return value


def test_what_is_adopted_outlives_its_maker() -> None:
    owner = ArenaHolder.create(SIZES)
    written(owner, "words", 7)
    of_owner = owner.handles
    peer = ArenaHolder.adopt([of_owner])
    owner.close()
    second = ArenaHolder.adopt([of_owner, peer.handles])
    with closing(peer, second):
        assert first_byte(second, "words") == 7
        assert second.handles.keys() == SIZES.keys()
        assert {name: handle.nbytes for name, handle in second.handles.items()} == SIZES


def test_without_a_live_holder_all_are_named() -> None:
    owner = ArenaHolder.create(SIZES)
    handles = owner.handles
    owner.close()
    with pytest.raises(MegatrainError, match=r"cannot attach arena megatrain-[0-9a-f]{8}-words .*; cannot attach"):
        ArenaHolder.adopt([handles, handles])


def test_arenas_of_two_runs_are_never_mixed_up() -> None:
    """The descriptor of a closed arena is given out again, for the same arena of another run."""
    first = ArenaHolder.create(SIZES)
    stale = first.handles
    first.close()
    second = ArenaHolder.create(SIZES)
    with closing(second):
        assert {h.fd for h in stale.values()} == {h.fd for h in second.handles.values()}
        with pytest.raises(MegatrainError, match="cannot attach"):
            ArenaHolder.adopt([stale])


def test_a_failed_adoption_leaves_no_descriptor() -> None:
    owner = ArenaHolder.create(SIZES)
    gone = dict(owner.handles)
    with closing(owner):
        gone["state-0"] = ArenaHandle(os.getpid(), 999, 5000, "x")
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(MegatrainError):
            ArenaHolder.adopt([gone])
        assert len(list(Path("/proc/self/fd").iterdir())) == before
