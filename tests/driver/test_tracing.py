"""The driver's side of a timeline: when it asks, and what it writes where something fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from megatrain_ray.accounting.trace_file import find_traces, read_trace
from megatrain_ray.driver.tracing import Tracing
from megatrain_ray.spans import RecordedSpans, Row, Span
from tests.support.settings import config

STEP = RecordedSpans(7, (Span(Row.STEPS, "step 2", 0, 10),), 0)
UPDATE = RecordedSpans(8, (Span(Row.UPDATES, "update", 2, 8, 0),), 3)


@dataclass
class FakeCrew:
    """Stands in for a crew whose calls are their answers."""

    answers: dict[str, Any] = field(default_factory=lambda: {"GPU worker": STEP, "optimizer shard 0": UPDATE})
    asked: list[int] = field(default_factory=list)

    def check(self) -> None: ...

    def spans(self, last: int) -> dict[str, Any]:
        self.asked.append(last)
        return self.answers


@pytest.fixture(autouse=True)
def answers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)


def tracing(folder: Path, first: int, last: int, completed: int = 0) -> Tracing:
    plan = SimpleNamespace(layers=[SimpleNamespace(name="embed")], update_deadline_s=1.0)
    run_spec: Any = SimpleNamespace(config=config(train__steps=9, log__trace=[first, last]), plan=plan)
    return Tracing(run_spec, folder, completed)


def run(traced: Tracing, crew: Any, completed: int, last: int) -> list[bool]:
    """Make the steps; return after each whether the driver's own spans are recorded."""
    watched = []
    for step in range(completed + 1, last + 1):
        traced.ended(crew, step)
        watched.append(traced.spans.on)
    traced.finish(crew, last)
    traced.close()
    return watched


def processes(path: Path) -> list[str]:
    return [event["args"]["name"] for event in read_trace(path) if event["name"] == "process_name"]


def test_spans_are_asked_for_once_after_the_last_traced_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = FakeCrew()
    assert run(tracing(tmp_path, 2, 3), crew, 0, 5) == [True, True, False, False, False]
    assert crew.asked == [3]
    (path,) = find_traces(tmp_path)
    assert path.name == "trace_steps_2_3.json"
    assert processes(path) == ["GPU worker", "optimizer shard 0", "driver"]
    assert '"spans_dropped": {"optimizer shard 0": 3}' in path.read_text()
    assert f"traced steps 2 to 3: {path} (open it at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("completed", "last", "asked", "name"),
    [(0, 1, [], None), (0, 3, [3], "trace_steps_2_3.json"), (3, 5, [5], "trace_steps_4_5.json"), (6, 9, [], None)],
)
def test_a_start_traces_what_it_makes_of_the_steps(
    tmp_path: Path, completed: int, last: int, asked: list[int], name: str | None
) -> None:
    """[2, 6]: a start that ends before, in the middle, one that goes on in the middle and is interrupted, one after."""
    crew = FakeCrew()
    run(tracing(tmp_path, 2, 6, completed), crew, completed, last)
    assert crew.asked == asked
    assert [path.name for path in find_traces(tmp_path)] == ([name] if name else [])


def test_a_process_that_died_is_left_out(tmp_path: Path) -> None:
    run(tracing(tmp_path, 2, 2), FakeCrew({"GPU worker": STEP, "optimizer shard 0": RayActorError()}), 0, 3)
    assert processes(*find_traces(tmp_path)) == ["GPU worker", "driver"]


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tracing(tmp_path / "gone", 2, 2), FakeCrew(), 0, 3)
    assert "warning: the trace was not written (" in capsys.readouterr().err
