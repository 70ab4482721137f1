"""What GPU worker and shards tell each other in shared words, and how long they wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain_ray.engine.host.signal_words import NUM_LOGGED, SlabRegion
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.errors import DeadlineError, MegatrainError
from tests.support.shards import header, new_words

WAIT_S = 60.0


def test_waiting_is_bounded_and_says_where_things_stand() -> None:
    words = new_words(generation=6)
    words.gradients.land(1, 7, 0)
    words.generations.finish(0, 1, 7)
    words.generations.wait(0, 1, 7, 0.0)
    with pytest.raises(DeadlineError, match=r"layer 1 did not get generation 7 .* that of update 7, .* committed .* 6"):
        words.generations.wait(1, 1, 7, 0.0)
    assert not words.gradients.wait_landed(1, 7, 0.0, committed=True), "landed, but not committed"
    words.updates.commit(header(7))
    assert words.gradients.wait_landed(1, 7, 0.0, committed=True)
    with pytest.raises(DeadlineError, match="layer 1 did not get generation 7 within 0 s: optimizer shard 1 is stuck"):
        words.generations.wait(1, 1, 7, 0.0)
    assert not words.gradients.wait_landed(0, 7, 0.0, committed=True), "committed, but not landed"


def test_a_save_is_wanted_of_one_generation() -> None:
    words = new_words(generation=4)
    assert not any(words.updates.saved_at(generation) for generation in range(8))
    words.updates.commit(header(5))
    words.updates.commit(replace(header(6), save=True))
    words.updates.commit(header(7))
    assert [generation for generation in range(12) if words.updates.saved_at(generation)] == [6]


def test_the_bell_counts_what_happens() -> None:
    words = new_words()
    seen = words.generation_bell()
    assert words.wait_generation_bell(seen, 0.0) == seen
    words.generations.finish(1, 2, 1)
    assert words.wait_generation_bell(seen, WAIT_S) > seen


def test_a_header_is_exact_and_outlives_later_commits() -> None:
    words = new_words(generation=9)
    committed = [UpdateParams(10 + k, 7 + k, 0.1 / 3 * k, float("nan") if k == 2 else 0.3, k == 2) for k in range(3)]
    for one in committed:
        words.updates.commit(one)
    assert [repr(words.updates.params(one.update)) for one in committed] == [repr(one) for one in committed]
    with pytest.raises(MegatrainError, match="its place holds update 10"):
        words.updates.params(10 + NUM_LOGGED)


def test_commits_come_in_order_and_never_overtake_a_shard_by_a_ring() -> None:
    words = new_words(generation=0)
    with pytest.raises(MegatrainError, match="update 2 cannot be committed: the last one was 0"):
        words.updates.commit(header(2))
    for update in range(1, NUM_LOGGED):
        words.updates.commit(header(update))
    with pytest.raises(MegatrainError, match="at generation 0, expected at least 1"):
        words.updates.commit(header(NUM_LOGGED))
    for shard in range(2):
        for layer in range(3):
            words.generations.finish(shard, layer, 1)
    words.updates.commit(header(NUM_LOGGED))


def test_a_gradient_may_not_land_on_one_that_is_still_read() -> None:
    words = new_words()
    words.gradients.land(0, 1, 128)
    words.generations.finish(0, 0, 1)
    with pytest.raises(MegatrainError, match="layer 0 landed for update 2, but the layer is at generation 0"):
        words.gradients.land(0, 2, 256)
    assert words.gradients.start(SlabRegion.GRADIENT, 0) == 128


def test_gradients_of_a_step_that_was_not_committed_are_withdrawn() -> None:
    """Layer 0 had landed for it, layer 1 not; both are at the generation of the last update."""
    words = new_words(generation=6)
    for layer in (0, 1):
        words.gradients.land(layer, 7, 0)
    words.updates.commit(header(7))
    for shard in (0, 1):
        for layer in (0, 1):
            words.generations.finish(shard, layer, 7)
    words.gradients.land(0, 8, 64)
    assert words.updates.committed == 7
    assert [words.gradients.has_landed(layer, 8) for layer in (0, 1)] == [True, False]
    words.gradients.withdraw(7)
    assert not words.gradients.has_landed(0, 8)
    assert all(words.gradients.has_landed(layer, 7) for layer in (0, 1))
    assert not words.gradients.wait_landed(0, 8, 0.0, committed=False)
