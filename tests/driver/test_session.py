"""The driver's loop against a crew that answers in order, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.exceptions import RayActorError

from megatrain_ray.console.startup import Startup
from megatrain_ray.driver import run_saves, session
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.driver.run_saves import SaveRates
from megatrain_ray.driver.session import Session
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.errors import InterruptedRunError, MegatrainError
from megatrain_ray.io.saves.manifest import SaveTiming
from megatrain_ray.metrics.sink import MetricSinks
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.workers.messages import Progress, StepResult
from tests.support.planned_steps import PROFILE, measured, planned
from tests.support.settings import config

STEPS = 6


class FakeCrew:
    """Ends calls in order. `deaths`: steps in which the GPU worker dies once; `skipped`: those that are skipped."""

    def __init__(self, deaths: set[int], skipped: set[int]) -> None:
        self.gpu = 0
        self.pids: dict[str, int] = {}
        self.remote_pids: dict[str, list[int]] = {}
        self.made: list[tuple[int, int]] = []  # GPU worker and step of every call
        self._deaths, self._skipped = deaths, skipped
        self._num_applied = 0

    def step(self, step: int, save: bool) -> tuple[int, int]:
        self.made.append((self.gpu, step))
        return self.made[-1]

    def ask_prepared(self, submitted: int) -> None: ...

    def wait(self, calls: list[Any], timeout_s: float) -> list[Any]:
        return calls

    def result(self, call: tuple[int, int]) -> StepResult:
        _, step = call
        if step in self._deaths:
            self._deaths.remove(step)
            raise RayActorError
        skipped = step in self._skipped
        self._num_applied += not skipped
        row = measured(planned(PROFILE), PROFILE)[0] | {"step": step, "skipped": skipped, "loss": 1 / step}
        row |= {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1.0, "bad_parameter": "head"}
        return StepResult(row, Progress(step, self._num_applied))

    def recover(self, error: RayActorError, gpu: int | None = None) -> None:
        self.gpu += 1

    def check(self, within_s: float = 0.0) -> None: ...

    def current_phase(self) -> str:
        return "nowhere"

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class SlowData(FakeCrew):
    """Has the data of each step after some hours. The step ends some seconds later."""

    now_s = 0.0
    ends = True

    def ask_prepared(self, submitted: int) -> Any:
        return "prepared", submitted + 1

    def wait(self, calls: list[Any], timeout_s: float) -> list[Any]:
        self.now_s += 1 if any(call[0] != "prepared" for call in calls) else STEP_DEADLINE_S
        self.ends = not self.ends
        return calls if self.ends else []

    def result(self, call: Any) -> Any:
        return call[1] if call[0] == "prepared" else super().result(call)


class FakeSave:
    """A save of one part, which is written at once. In `dead` a shard dies in the save of a step, once."""

    told: ClassVar[list[str]] = []
    dead: ClassVar[set[int]] = set()
    waited_s = 0.0

    def __init__(self, job: RunContext, crew: FakeCrew, step: int, predicted_stall_s: float) -> None:
        self.step, self.calls, self.num_updates, self.complete = step, [("save", step)], -1, False

    def reached(self, progress: Progress) -> None:
        self.num_updates, self.complete = progress.adam_step, not self.calls

    def add_result(self, call: tuple[str, int]) -> None:
        if self.step in self.dead:
            self.dead.remove(self.step)
            raise RayActorError
        self.calls.remove(call)
        self.complete = self.num_updates >= 0

    def check_deadline(self) -> None: ...

    def commit(self) -> SaveTiming:
        self.told.append(f"committed {self.step}")
        return SaveTiming(0.0, 0.0, 0.0, 0)

    def abandon(self) -> None:
        self.told.append(f"abandoned {self.step}")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    settings = config(run_dir=str(tmp_path / "run"), train__steps=STEPS, save_every=None, max_skipped=2)
    with RunDir.open(settings) as opened:
        opened.begin(planned(PROFILE).to_json(), 0)
        yield opened


def trained(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, crew: FakeCrew, *, interrupted: bool = False,
    save_every: int | None = None, streamed: Any = None,
) -> int:  # fmt: skip
    monkeypatch.setattr(session, "WorkerGroup", lambda *_: crew)
    monkeypatch.setattr(session, "start_processes", lambda *_: SaveRates(1e9, 1e9))
    monkeypatch.setattr(run_saves, "RunningSave", FakeSave)
    settings = run.config.model_copy(update={"save_every": save_every})
    run_spec: Any = SimpleNamespace(config=settings, plan=planned(PROFILE), keeps_logprobs=False)
    interrupts: Any = SimpleNamespace(requested=interrupted, put_off=nullcontext)
    others: Any = SimpleNamespace(check=lambda: None)
    job = RunContext(run_spec, (), 40, None, run, interrupts, others, Startup(), others, streamed=streamed)
    return Session(job, None, MetricSinks({})).train()


def test_it_makes_all_steps_two_at_a_time(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = FakeCrew(set(), set())
    assert trained(run, monkeypatch, crew) == STEPS
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert crew.made == [(0, step) for step in range(1, STEPS + 1)]


def test_steps_that_had_not_ended_are_repeated_by_another_gpu_worker(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = FakeCrew({3}, set())
    assert trained(run, monkeypatch, crew) == STEPS
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert crew.made == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (1, 5), (1, 6)]


def test_a_wait_for_data_has_no_deadline_and_counts_in_none(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = SlowData(set(), set())
    monkeypatch.setattr("time.monotonic", lambda: crew.now_s)
    assert trained(run, monkeypatch, crew, streamed=True) == STEPS
    assert crew.now_s > 2 * STEP_DEADLINE_S


def test_a_run_that_has_diverged_ends(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        MegatrainError, match=r"the last 3 steps were skipped.*\(max_skipped: 2\).*there is no save yet"
    ):
        trained(run, monkeypatch, FakeCrew(set(), {2, 3, 4, 5}))


def test_an_interrupted_run_says_what_it_leaves(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InterruptedRunError, match=r"interrupted after step 0, nothing saved \(save_every: null\)"):
        trained(run, monkeypatch, FakeCrew(set(), set()), interrupted=True)


def test_saves_are_committed_made_again_and_dropped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard that writes the save of step 2 dies; steps 5 and 6 change nothing that a save would hold."""
    told: list[str] = []
    monkeypatch.setattr(FakeSave, "told", told)
    monkeypatch.setattr(FakeSave, "dead", {2})
    assert trained(run, monkeypatch, FakeCrew(set(), {5}), save_every=2) == STEPS
    assert told[0] == "abandoned 2" and told[-1] == f"committed {STEPS}"
    told.clear()
    with pytest.raises(MegatrainError, match="the save of step 4 is intact"):
        trained(run, monkeypatch, FakeCrew(set(), {5, 6}), save_every=2)
    assert told == ["committed 2", "committed 4", "abandoned 6"]
