"""SpanLog: what is recorded, by whom, and how much at most."""

from __future__ import annotations

import os
import threading

import pytest

from megatrain_ray.spans import Row, Span, SpanLog, traced_steps, traced_updates


def test_a_log_that_is_off_records_nothing() -> None:
    log = SpanLog()
    with log.span(Row.COMPUTE, "forward", 1):
        log.on = True
        with log.span(Row.H2D, "load", 2, num_bytes=8):
            log.on = False
    assert [(span.row, span.name, span.layer, span.num_bytes) for span in log.take().spans] == [(Row.H2D, "load", 2, 8)]
    assert log.take() == (os.getpid(), (), 0)


def test_spans_lie_in_the_time_of_their_blocks_and_failed_ones_are_kept() -> None:
    log = SpanLog()
    log.on = True
    with pytest.raises(ValueError, match="x"), log.span(Row.STEPS, "step 1"):
        with log.span(Row.STEPS, "wait data", waits=True):
            pass
        raise ValueError("x")
    inner, outer = log.take().spans
    assert (inner.name, inner.waits, outer.name, outer.waits) == ("wait data", True, "step 1", False)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_ray.spans.MAX_SPANS", 3)
    log = SpanLog()
    for start in range(5):
        log.add(Span(Row.COMPUTE, "forward", start, start + 1))
    taken = log.take()
    assert [span.start_ns for span in taken.spans] == [0, 1, 2]
    assert taken.num_dropped == 2
    assert log.take().num_dropped == 0


def test_threads_lose_no_span() -> None:
    log = SpanLog()
    log.on = True

    def record() -> None:
        for _ in range(500):
            with log.span(Row.SAVE, "write"):
                pass

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.take().spans) == 2000


def test_the_update_under_the_first_traced_step_is_traced_too() -> None:
    assert list(traced_steps((5, 7))) == [5, 6, 7]
    assert list(traced_updates(traced_steps((5, 7)))) == [4, 5, 6, 7]
    assert not traced_updates(traced_steps(None))
