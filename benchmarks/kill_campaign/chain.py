"""Starts the same command in one run directory again and again: killed, resumed, killed, until the run is done."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.kill_campaign import checks
from benchmarks.kill_campaign.cases import DRIVER, Case, Needs, Outcome
from benchmarks.kill_campaign.checks import OK, Undisturbed
from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.phases import by_saves
from benchmarks.kill_campaign.processes import go_on, stop
from benchmarks.kill_campaign.strike import Blow, Hit, strike
from megatrain_ray.io.saves.save_folder import list_saves
from tests.support.runs import command

STRIKE_S = 90.0  # limit for a phase to come
END_S = 120.0  # limit for a run to end, or to go on, after a kill: more is a hang
RUN_S = 1800.0  # limit of a whole run that is left alone; 250 steps took over 600 s on two cores busy with other work
GOING_ON = (Outcome.REPLACED, Outcome.GOES_ON)
AFTER_A_SAVE = Case((Blow((DRIVER,), by_saves("after a save", lambda s: bool(s.committed))),))


@dataclass
class Result:
    """Holds what was hit in one case, and what was found.

    `seconds`: from the kill to the end, or to the next updates.
    """

    case: str
    variant: str
    outcome: str
    hits: list[Hit]
    exit_code: int | None = None
    seconds: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        return checks.problems(self.checks)


@dataclass(frozen=True)
class _Pending:
    """Holds the step from which the run that `result` ended must resume.

    The next start of the run shows whether it does.
    """

    result: Result
    step: int
    num_starts: int


class Chain:
    """Kills one run in case after case and checks it each time. `config`: of a run in `folder`/run, not yet started."""

    def __init__(self, folder: Path, config: Path, undisturbed: Undisturbed) -> None:
        self._folder = folder
        self._run_dir = folder / "run"
        self._config = config
        self._undisturbed = undisturbed
        self._shared_memory = checks.shared_memory_names()
        self._runs: list[LiveRun] = []
        self._live: LiveRun | None = None
        self._pending: _Pending | None = None
        self.results: list[Result] = []

    def possible(self, cases: Sequence[Case]) -> Case | None:
        """Return the first case whose phase can come next; AFTER_A_SAVE if none can before there is a save."""
        saved = bool(list_saves(self._run_dir / "saves"))
        for case in cases:
            early = case.blows[0].phase.early
            ready = case.needs is Needs.ANYTHING or saved == (case.needs is Needs.A_SAVE)
            if self._live and case.outcome is Outcome.GOES_ON:
                # Nobody takes their place: a run in which they were killed does not have them any more.
                ready = ready and all(map(self._live.processes.find, case.blows[0].actors))
            if (ready and not early) or (ready and self._live is None):
                return case
        if self._live is None and not saved and cases:
            return AFTER_A_SAVE
        return None

    def perform(self, case: Case) -> Result | None:
        """Perform the case and return its result, or None if its phase did not come; the run may be over then.

        If only some of several blows came, the result is that of these, and has their name.
        """
        live = self._live = self._live or self._start()
        num_failures = _num_failures(live)
        hits = list(self._hits(live, case))
        if not hits:
            return None
        case = replace(case, blows=case.blows[: len(hits)])
        if case.outcome is not Outcome.GOES_ON:
            num_failures += sum(len(hit.pids) for hit in hits)
        start_s = time.monotonic()
        outcome = case.outcome if case.outcome is not Outcome.EITHER else self._became(live, num_failures)
        result = Result(case.name, case.variant.name, outcome.name, hits)
        self.results.append(result)
        if outcome in GOING_ON:
            result.checks["goes on"] = self._goes_on(live, num_failures)
        else:
            result.exit_code = self._end(live)
            expected = 1 if outcome is Outcome.ENDED else -9
            right = result.exit_code == expected
            result.checks["exit"] = OK if right else f"expected exit {expected}, got {result.exit_code}"
        result.seconds = round(time.monotonic() - start_s, 2)
        self._check(result, case, outcome, live)
        return result

    def finish(self) -> dict[str, str]:
        """Let the run come to its end, and return the verdict of each check that must hold then."""
        live = self._live or self._start()
        try:
            code: int | None = live.process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            code = None
        self._live = None
        self._check_resumed()
        verdicts = {"exit": OK if code == 0 else f"expected exit 0, got {code}: {live.last_words()}"}
        if code == 0:
            same = checks.digest(self._run_dir, self._folder / "exported") == self._undisturbed.digest
            verdicts["masters"] = OK if same else "differ from the undisturbed run's"
            verdicts["rows"] = checks.of_rows(self._run_dir, self._undisturbed, whole=True)
            verdicts["unfinished files"] = checks.of_unfinished(self._run_dir)
        verdicts["saves"] = checks.of_saves(self._run_dir, ())
        verdicts["processes"] = checks.of_all_processes(self._runs)
        verdicts["folders"] = checks.of_folders([run.process.pid for run in self._runs])
        verdicts["shared memory"] = checks.of_shared_memory(self._shared_memory)
        for run in self._runs:
            run.close()
        return verdicts

    @property
    def over(self) -> bool:
        """Return whether the command ended by itself."""
        return self._live is not None and self._live.over

    def _start(self) -> LiveRun:
        output = self._folder / f"output_{len(self._runs)}.txt"
        live = LiveRun(command("train", str(self._config)), self._run_dir, output)
        self._runs.append(live)
        return live

    def _hits(self, live: LiveRun, case: Case) -> Iterator[Hit]:
        """Yield the hits of the case's blows, up to the first whose phase does not come."""
        for blow in case.blows:
            hit = strike(live, blow, STRIKE_S)
            if hit is None:
                return
            yield hit

    def _check(self, result: Result, case: Case, outcome: Outcome, live: LiveRun) -> None:
        self._check_resumed()
        result.checks["message"] = checks.of_message(live, outcome, case.roles)
        result.checks["rows"] = checks.of_rows(self._run_dir, self._undisturbed)
        if outcome in GOING_ON and live.process.poll() in (None, 0):
            result.checks["saves"] = self._of_saves(result, live)
            return
        self._live = None
        result.checks["processes"] = checks.of_processes(live, outcome)
        if result.checks["processes"] != OK or result.exit_code is None:
            live.close()
        result.checks["saves"] = self._of_saves(result, live)
        if outcome is Outcome.ENDED:
            result.checks["folders"] = checks.of_folders([live.process.pid])
        self._pending = _Pending(result, max(list_saves(self._run_dir / "saves"), default=0), len(self._starts()))

    def _of_saves(self, result: Result, live: LiveRun) -> str:
        """Check the saves. A living driver is stopped meanwhile: it would delete saves that are being read."""
        stopped = live.process.poll() is None and stop(live.process.pid)
        try:
            return checks.of_saves(self._run_dir, {step for hit in result.hits for step in hit.committed})
        finally:
            if stopped:
                go_on(live.process.pid)

    def _check_resumed(self) -> None:
        starts = self._starts()
        if self._pending and len(starts) > self._pending.num_starts:
            step, expected = starts[self._pending.num_starts], self._pending.step
            verdict = OK if step == expected else f"resumed from step {step}, the newest save was that of {expected}"
            self._pending.result.checks["resumed"] = verdict
            self._pending = None

    def _starts(self) -> list[int]:
        """Return the steps from which the starts of this run went on, as its log says."""
        log = self._run_dir / "logs" / "driver.log"
        return [int(step) for step in re.findall(r"step (\d+) of \d+, cpu", log.read_text())] if log.exists() else []

    def _end(self, live: LiveRun) -> int | None:
        """Return the exit code, or None if the run hangs."""
        try:
            return live.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return None

    def _became(self, live: LiveRun, num_failures: int) -> Outcome:
        """Return which of the two outcomes it was: REPLACED if the run says that it replaced the dead, else ENDED."""
        deadline_s = time.monotonic() + END_S
        while not live.over and time.monotonic() < deadline_s and _num_failures(live) < num_failures:
            time.sleep(0.02)
        return Outcome.REPLACED if _num_failures(live) >= num_failures else Outcome.ENDED

    def _goes_on(self, live: LiveRun, num_failures: int) -> str:
        """Wait for three more updates, after the replacement where there is one, and return the verdict."""
        deadline_s = time.monotonic() + END_S
        first = None
        while not live.over and time.monotonic() < deadline_s:
            moment = live.moment()
            if moment is not None and _num_failures(live) >= num_failures:
                first = moment.committed if first is None else min(first, moment.committed)
                if moment.committed >= first + 3:
                    return OK
            time.sleep(0.02)
        if live.process.poll() == 0:
            return OK
        return f"it does not go on: exit {live.process.poll()}, {live.moment()}: {live.last_words()}"


def _num_failures(live: LiveRun) -> int:
    """Return how many failures the run has reported, by its own count. One line may report two.

    A failure is reported after a replacement, but before all actors start again.
    """
    return max((int(number) for number in re.findall(r"\(failure (\d+) of at most", live.text())), default=0)
