"""The link between GPUs: measured once for those that a run gets, kept for these, told where they hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.console.startup import Startup
from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.measure import timing
from megatrain_ray.engine.measure.measure_profile import measure_link
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.profiling import measure_process
from megatrain_ray.profiling.profiles import (
    measure_everything,
    measure_link_here,
    measured,
    profile_file,
    this_machine,
    with_profile,
)
from tests.profiling.test_profiles import GPU, LITTLE

FIRST_TWO, FIRST_AND_UNKNOWN = ("0000:18:00.0", "0000:2a:00.0"), ("0000:18:00.0", None)


def test_a_link_between_gpus_has_the_bytes_of_an_exchange_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock knows what an exchange takes; a round has two exchanges in a row."""
    exchange_s = 2.0**-10
    asked: list[tuple[int, int]] = []

    def make_exchange(num_bytes: int) -> Callable[[int], None]:
        return lambda count: asked.append((num_bytes, count))

    def seconds(work: Callable[[], object]) -> float:
        before = len(asked)
        work()
        return sum(exchange_s * count for _, count in asked[before:]) or 1.0

    monkeypatch.setattr(timing, "seconds_of", seconds)
    effort = replace(LITTLE, budget_s=2 * timing.ROUNDS * exchange_s)
    assert measure_link(make_exchange, effort) == effort.copy_bytes / exchange_s
    assert set(asked) == {(effort.copy_bytes, 1), (effort.copy_bytes, 2)}


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str | None, ...]]:
    """Return sets of visible GPUs, of which the last counts; the test has a cache of its own."""
    seen: list[tuple[str | None, ...]] = [FIRST_TWO]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("megatrain_ray.profiling.profiles.total_memory_bytes", lambda: 24 << 30)
    monkeypatch.setattr("megatrain_ray.profiling.profiles.device_name", lambda: "some GPU")
    monkeypatch.setattr("megatrain_ray.profiling.profiles.pci_addresses", lambda: seen[-1])
    return seen


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that fills with what measuring processes are asked for.

    The first link has 1 byte per second more than 1e11, the next one 2.
    """
    asked: list[str] = []

    def run(function: str, bound_s: float, *arguments: str) -> str:
        asked.append(function)
        of_machine = replace(TYPICAL_GPU, machine=this_machine("cuda"), launch_s=0.5)
        return of_machine.to_json() if function == "print_profile" else f"{1e11 + asked.count('print_link')}\n"

    monkeypatch.setattr("megatrain_ray.profiling.profiles._run", run)
    return asked


def link_of_two() -> float | None:
    machine = measured(GPU, "auto", Startup(), host_gpus=2)
    assert machine.rates.launch_s == 0.5
    assert with_profile(GPU, "auto", host_gpus=2) == machine
    assert with_profile(GPU, "auto").rates.gpu_link_bytes_per_s is None
    return machine.rates.gpu_link_bytes_per_s


def test_a_run_on_several_gpus_measures_their_link_once(
    visible: list[tuple[str | None, ...]], done: list[str], tmp_path: Path
) -> None:
    """The link is that of the visible GPUs, also where the rest was measured before, or is measured anew."""
    assert measured(GPU, "auto", Startup()).rates.gpu_link_bytes_per_s is None
    assert done == ["print_profile"]
    assert link_of_two() == link_of_two() == 1e11 + 1
    visible.append(FIRST_AND_UNKNOWN)
    assert link_of_two() == 1e11 + 2
    visible.append((*FIRST_TWO, "0000:3a:00.0"))
    assert link_of_two() == 1e11 + 1
    visible.append(FIRST_TWO[:1])  # the driver sees less than its cluster has
    assert link_of_two() is None
    visible.append(FIRST_TWO)
    assert done == ["print_profile", "print_link", "print_link"]
    profile_file(this_machine("cuda")).unlink()
    assert link_of_two() == 1e11 + 1
    assert done == ["print_profile", "print_link", "print_link", "print_profile"]
    for kept in tmp_path.glob("**/*.links.json"):
        kept.write_text("[]")
    assert link_of_two() == 1e11 + 3


@pytest.mark.parametrize("error", [DeadlineError, MegatrainError])
def test_gpus_that_hang_are_not_asked_again_unless_somebody_wants_it(
    error: type[MegatrainError],
    visible: list[tuple[str | None, ...]],
    done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It costs every start the whole bound. Whatever else fails, which is told soon, may be over at the next one."""
    measured(GPU, "auto", Startup())

    def fail(function: str, bound_s: float, *arguments: str) -> str:
        done.append(function)
        raise error("the link between GPUs was not measured")

    with monkeypatch.context() as patch:
        patch.setattr("megatrain_ray.profiling.profiles._run", fail)
        assert (link_of_two(), link_of_two()) == (None, None)
        assert done == ["print_profile", "print_link"] + ["print_link"] * (error is MegatrainError)
        assert ("hung when their link was measured" in caplog.text) == (error is DeadlineError)
    monkeypatch.setattr("megatrain_ray.profiling.profiles.num_gpus", lambda: 4)
    visible.append((*FIRST_TWO, "0000:3a:00.0", "0000:4a:00.0"))
    assert measure_everything("cuda").gpu_link_bytes_per_s is not None
    link = link_of_two()
    assert link is not None
    monkeypatch.setattr("megatrain_ray.profiling.profiles._run", fail)
    with pytest.raises(error):
        measure_link_here(replace(TYPICAL_GPU, machine=this_machine("cuda")), 2)
    assert link_of_two() == link  # which a machine that was busy later does not lose


@pytest.mark.parametrize(
    ("count", "pairs"), [(2, [(0, 1)]), (3, [(0, 1), (1, 2), (2, 0)]), (4, [(0, 1), (1, 2), (2, 3), (3, 0)])]
)
def test_a_ring_is_as_fast_as_its_slowest_pair(
    count: int, pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[int, int, int]] = []

    class Copies:
        def __init__(self, num_bytes: int, one: int, other: int) -> None:
            made.append((num_bytes, one, other))
            self.run = made.__len__  # which tells the pairs apart

    def rate(make_exchange: Callable[[int], Callable[[], int]]) -> float:
        return 10.0 + abs(make_exchange(8)() - 2)  # the second one is the slowest where there is one

    monkeypatch.setattr("sys.argv", ["measuring", str(count)])
    monkeypatch.setattr(measure_process, "PeerCopies", Copies)
    monkeypatch.setattr(measure_process, "measure_link", rate)
    measure_process.print_link()
    assert made == [(8, *pair) for pair in pairs]
    assert float(capsys.readouterr().out) == (10.0 if count > 2 else 11.0)


@pytest.mark.parametrize(("count", "link"), [(1, None), (2, 3e11)])
def test_the_link_is_measured_with_everything_else(
    count: int, link: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured where there are several GPUs. If these do not reach each other, the rest is known."""
    alone = replace(TYPICAL_GPU, gpu_link_bytes_per_s=None)
    monkeypatch.setattr("megatrain_ray.profiling.profiles.num_gpus", lambda: count)
    monkeypatch.setattr("megatrain_ray.profiling.profiles.measure_here", lambda device: alone)
    monkeypatch.setattr(
        "megatrain_ray.profiling.profiles.measure_link_here",
        lambda profile, count: replace(profile, gpu_link_bytes_per_s=3e11),
    )
    assert measure_everything("cuda").gpu_link_bytes_per_s == link

    def fail(profile: object, count: int) -> None:
        raise MegatrainError("they do not meet")

    monkeypatch.setattr("megatrain_ray.profiling.profiles.measure_link_here", fail)
    assert measure_everything("cuda") == alone
