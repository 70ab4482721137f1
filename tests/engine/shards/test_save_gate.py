"""SaveGate: a save is one generation, whatever updates do meanwhile."""

from __future__ import annotations

import pytest

from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.shards.save_gate import LayerState
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.saves.save_writer import Piece
from tests.support.blocking_fakes import KINDS, NUM_LAYERS, WAIT_S, attempt, read, running


def test_updates_that_no_save_wants_are_not_held_up() -> None:
    with running() as run:
        for update in range(1, 6):
            run.update_all(update, save=False)
        assert run.words.generations.of_layer(0) == 5


def test_a_layer_is_overwritten_only_after_it_was_written() -> None:
    last = NUM_LAYERS - 1  # the first to be written, since its next update comes last
    with running() as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        overwriting = run.in_thread(lambda: run.update(last, 2))
        save = run.gate.begin(attempt(1))
        pieces = run.gate.pieces(save)
        assert read(run, save, pieces, 1) == [1]
        assert not overwriting.done(), "half a layer was written"
        assert read(run, save, pieces, 1) == [1]
        overwriting.result(WAIT_S)
        others = [run.in_thread(lambda layer=layer: run.update(layer, 2)) for layer in range(last)]
        assert read(run, save, pieces, 4) == [1] * 4
        for other in others:
            other.result(WAIT_S)
        assert next(pieces, None) is None
        assert save.stall_s > 0


def test_copies_are_made_ahead_of_the_writer() -> None:
    """It reads the layer whose update comes last, so that the others need not wait for what is being read."""
    with running(num_copies=NUM_LAYERS) as run:
        run.update_all(1, save=True)
        save = run.gate.begin(attempt(1))
        pieces = run.gate.pieces(save)
        being_read = next(pieces)
        run.commit(2, save=False)
        for layer in range(NUM_LAYERS - 1):
            run.update(layer, 2)
        assert run.shard.copied == list(range(NUM_LAYERS - 1))
        run.gate.part_read(save, being_read)
        last = run.in_thread(lambda: run.update(NUM_LAYERS - 1, 2))
        assert read(run, save, pieces, 5) == [1] * 5
        last.result(WAIT_S)


def test_a_layer_is_copied_while_it_is_written() -> None:
    """Its update waits for the part that is in hand, not for the disk; the writer goes on with the copy."""
    last = NUM_LAYERS - 1
    with running(num_copies=NUM_LAYERS) as run:
        run.update_all(1, save=True)
        save = run.gate.begin(attempt(1))
        pieces = run.gate.pieces(save)
        in_hand = next(pieces)
        run.commit(2, save=False)
        overwriting = run.in_thread(lambda: run.update(last, 2))
        while save.states[last] is not LayerState.COPYING:
            assert not overwriting.done()
        reading = run.in_thread(lambda: next(pieces))
        assert set(in_hand.buffers[0]) == {1}
        run.gate.part_read(save, in_hand)
        overwriting.result(WAIT_S)
        assert run.shard.copied == [last]
        of_copy = reading.result(WAIT_S)
        assert isinstance(of_copy, Piece)
        assert set(of_copy.buffers[0]) == {1}, "the writer waited for the copy"
        run.gate.part_read(save, of_copy)
        assert read(run, save, pieces, 4) == [1] * 4


def test_a_layer_whose_last_part_was_in_hand_is_not_copied() -> None:
    last = NUM_LAYERS - 1
    with running(num_copies=1) as run:
        run.update_all(1, save=True)
        save = run.gate.begin(attempt(1))
        pieces = run.gate.pieces(save)
        assert read(run, save, pieces, 1) == [1]
        in_hand = next(pieces)
        run.commit(2, save=False)
        overwriting = run.in_thread(lambda: run.update(last, 2))
        while save.states[last] is not LayerState.COPYING:
            assert not overwriting.done()
        run.gate.part_read(save, in_hand)
        overwriting.result(WAIT_S)
        run.update(0, 2)
        assert run.shard.copied == [0], "its memory is free again"
        assert read(run, save, pieces, 4) == [1] * 4


def test_a_shard_without_a_part_of_a_layer_keeps_no_memory_for_it() -> None:
    with running(num_copies=2) as run:
        run.shard.absent.add(1)
        for update in (1, 3):
            run.update_all(update, save=True)
            save = run.gate.begin(attempt(update))
            run.update_all(update + 1, save=False)
            assert read(run, save, run.gate.pieces(save), 4) == [update] * 4
        assert run.shard.copied == [0, 2, 0, 2]


def test_what_an_update_waits_for_is_written_next() -> None:
    with running() as run:
        run.update_all(1, save=True)
        save = run.gate.begin(attempt(1))
        run.commit(2, save=False)
        waiting = run.in_thread(lambda: run.update(0, 2))
        while save.wanted is None:
            assert not waiting.done()
        pieces = run.gate.pieces(save)
        assert read(run, save, pieces, 2) == [1, 1]
        waiting.result(WAIT_S)
        assert read(run, save, pieces, 4) == [1] * 4


def test_with_spare_ram_nothing_waits() -> None:
    with running(num_copies=NUM_LAYERS) as run:
        run.update_all(1, save=True)
        save = run.gate.begin(attempt(1))
        run.update_all(2, save=False)
        run.update_all(3, save=False)
        pieces = run.gate.pieces(save)
        assert read(run, save, pieces, 6) == [1] * 6
        assert run.shard.copied == [0, 1, 2]


def test_copies_stay_within_their_budget() -> None:
    with running(num_copies=1) as run:
        run.update_all(1, save=True)
        save = run.gate.begin(attempt(1))
        run.commit(2, save=False)
        run.update(0, 2)
        waiting = run.in_thread(lambda: run.update(1, 2))
        pieces = run.gate.pieces(save)
        assert read(run, save, pieces, 2) == [1, 1]
        assert not waiting.done() or run.shard.copied == [0, 1], "the copy of layer 0 is gone: there is room again"
        assert read(run, save, pieces, 2) == [1, 1]
        waiting.result(WAIT_S)
        assert read(run, save, pieces, 2) == [1, 1]
        assert run.shard.copied in ([0], [0, 1])


def test_the_writer_waits_for_updates_that_have_not_been_made() -> None:
    with running() as run:
        save = run.gate.begin(attempt(1))
        pieces = run.gate.pieces(save)
        first = run.in_thread(lambda: read(run, save, pieces, 2))
        assert not first.done()
        run.update_all(1, save=True)
        assert first.result(WAIT_S) == [1, 1]


def test_layers_that_no_update_changes_are_written_while_others_are_not_there() -> None:
    with running(fixed=(0, 2)) as run:
        save = run.gate.begin(attempt(1))
        pieces = run.gate.pieces(save)
        assert [next(pieces).layer for _ in KINDS] == ["layers.0"] * 2, "before the update that the save wants"
        run.words.updates.commit(UpdateParams(1, 1, 0.1, 1.0, skip=False, save=True))
        run.words.gradients.land(1, 1, 0)
        run.update(1, 1)
        assert [next(pieces).layer for _ in KINDS] == ["layers.1"] * 2, "what updates may wait for goes first"
        assert [piece.layer for piece in pieces] == ["layers.2"] * 2
        assert run.words.generations.of_layer(0) > 1
        assert run.words.generations.torn(0) is None


def test_the_update_waits_for_a_save_that_has_not_begun() -> None:
    with running(num_copies=NUM_LAYERS) as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        ahead = run.in_thread(lambda: run.update(0, 2))
        assert run.words.generations.of_layer(0) == 1
        save = run.gate.begin(attempt(1))
        ahead.result(WAIT_S)
        assert read(run, save, run.gate.pieces(save), 2) == [1, 1]


@pytest.mark.parametrize("begun", [False, True])
def test_nobody_waits_for_an_abandoned_save(begun: bool) -> None:
    with running() as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        waiting = run.in_thread(lambda: run.update(0, 2))
        if begun:
            save = run.gate.begin(attempt(1))
            pieces = run.gate.pieces(save)
        run.gate.abandon(attempt(1))
        waiting.result(WAIT_S)
        if begun:
            with pytest.raises(MegatrainError, match="the save of step 1 was abandoned"):
                next(pieces)


def test_the_next_save_is_another_one() -> None:
    with running(num_copies=NUM_LAYERS) as run:
        for update in (1, 2, 3):
            run.update_all(update, save=True)
            save = run.gate.begin(attempt(update))
            assert read(run, save, run.gate.pieces(save), 6) == [update] * 6
        assert run.shard.copied == []


def test_a_save_that_does_not_get_on_is_named() -> None:
    with running(timeout_s=0.0) as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        with pytest.raises(DeadlineError, match="optimizer shard 0 waited 0 s for the save of step 1 to begin"):
            run.update(0, 2)
        run.gate.begin(attempt(1))
        with pytest.raises(DeadlineError, match="for layer 0 of the save of step 1 to be written"):
            run.update(0, 2)


def test_stopping_ends_the_wait() -> None:
    with running() as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        waiting = run.in_thread(lambda: run.update(0, 2))
        run.words.stop()
        with pytest.raises(MegatrainError, match="stopped"):
            waiting.result(WAIT_S)


def test_the_writer_of_an_abandoned_save_does_not_disturb_the_next_one() -> None:
    with running(num_copies=NUM_LAYERS) as run:
        run.update_all(1, save=True)
        old = run.gate.begin(attempt(1))
        run.update_all(2, save=True)
        late = next(run.gate.pieces(old))
        run.gate.abandon(attempt(1))
        new = run.gate.begin(attempt(2))
        pieces = run.gate.pieces(new)
        first = next(pieces)
        run.gate.part_read(old, late)
        run.commit(3, save=False)
        waiting = run.in_thread(lambda: run.update(0, 3))
        run.gate.part_read(new, first)
        assert read(run, new, pieces, 5) == [2] * 5
        waiting.result(WAIT_S)


def test_abandoned_copies_make_room_for_the_next_save() -> None:
    with running(num_copies=NUM_LAYERS) as run:
        for update in (1, 2, 3):
            run.update_all(update, save=True)
            run.gate.begin(attempt(update))
            run.update_all(update + 1, save=False) if update == 3 else None
            run.gate.abandon(attempt(update))
        assert run.shard.copied == [0, 1, 2]
        run.update_all(5, save=True)
        save = run.gate.begin(attempt(5))
        run.update_all(6, save=False)
        assert read(run, save, run.gate.pieces(save), 6) == [5] * 6
        assert run.shard.copied == [0, 1, 2, 0, 1, 2]


def test_a_second_attempt_is_not_hit_by_what_ends_the_first() -> None:
    with running() as run:
        run.update_all(1, save=True)
        first = run.gate.begin(attempt(1, number=0))
        second = run.gate.begin(attempt(1, number=1))
        run.gate.abandon(attempt(1, number=0))
        run.gate.abandon(first.attempt)
        assert read(run, second, run.gate.pieces(second), 6) == [1] * 6
        assert first.abandoned and not second.abandoned


def test_a_save_that_was_abandoned_before_it_began_stays_so() -> None:
    with running() as run:
        run.update_all(1, save=True)
        run.gate.abandon(attempt(1))
        with pytest.raises(MegatrainError, match="the save of step 1 was abandoned"):
            run.gate.begin(attempt(1))
        run.update_all(2, save=False)


def test_a_shard_that_owns_nothing_of_any_layer_needs_no_memory_for_copies() -> None:
    spare = SnapshotBuffers([0, 0], 1 << 20)
    assert spare.take(0) is None
    spare.close()
