"""Hardware profiles: measured through the device seam, kept, read from files, refused where they are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray import measuring
from megatrain_ray.config import TrainConfig
from megatrain_ray.engine import measure_profile
from megatrain_ray.engine.cpu_device import CpuDevice
from megatrain_ray.engine.hardware_profile import TYPICAL_CPU, TYPICAL_GPU, HardwareProfile, MachineName
from megatrain_ray.engine.measure_profile import Effort, measure, measure_link
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError, DeadlineError, MegatrainError
from megatrain_ray.machine import cpu_name, driver_version
from megatrain_ray.planning import question_of
from megatrain_ray.profiles import (
    cached,
    measure_everything,
    measure_here,
    measure_link_here,
    measured,
    profile_file,
    this_machine,
    with_profile,
)
from megatrain_ray.startup import Startup
from tests.runs import config
from tests.test_planning import LLAMA

GPU = Machine(device="cuda", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=24 << 30)
CPU = replace(GPU, device="cpu", hbm_bytes=None)
LITTLE = Effort(
    budget_s=0.0, slow_s=1e9, elements=1 << 16, copy_bytes=1 << 16, device_bytes=1 << 16, widths=(8, 16), lengths=(8,)
)


def test_the_cpu_device_yields_a_profile() -> None:
    machine = MachineName("", "", "2", "some", 2)
    profile = measure(machine, lambda _: CpuDevice(num_threads=1), 2, LITTLE)
    assert profile.machine == machine
    assert [point.size for point in profile.matmul["bf16"]] == [2.0 * 8**3, 2.0 * 16**3]
    assert set(profile.matmul) == {"bf16", "fp32", "tf32"}
    assert profile.adamw_busy_per_s <= profile.adamw_per_s
    assert profile.gpu_link_bytes_per_s is None


def test_a_link_between_gpus_has_the_bytes_of_an_exchange_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that knows what an exchange takes, of which there are two in a row in a round."""
    exchange_s = 2.0**-10
    asked: list[tuple[int, int]] = []

    def make_exchange(num_bytes: int) -> Callable[[int], None]:
        return lambda count: asked.append((num_bytes, count))

    def seconds(work: Callable[[], object]) -> float:
        before = len(asked)
        work()
        return sum(exchange_s * count for _, count in asked[before:]) or 1.0

    monkeypatch.setattr(measure_profile, "_seconds", seconds)
    effort = replace(LITTLE, budget_s=2 * measure_profile.ROUNDS * exchange_s)
    assert measure_link(make_exchange, effort) == effort.copy_bytes / exchange_s
    assert set(asked) == {(effort.copy_bytes, 1), (effort.copy_bytes, 2)}


FIRST_TWO, FIRST_AND_UNKNOWN = ("0000:18:00.0", "0000:2a:00.0"), ("0000:18:00.0", None)


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str | None, ...]]:
    """Sets of visible GPUs, of which the last counts; with a cache of the test's own."""
    seen: list[tuple[str | None, ...]] = [FIRST_TWO]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("megatrain_ray.profiles.total_memory_bytes", lambda: 24 << 30)
    monkeypatch.setattr("megatrain_ray.profiles.device_name", lambda: "some GPU")
    monkeypatch.setattr("megatrain_ray.profiles.pci_addresses", lambda: seen[-1])
    return seen


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes that measure were asked. The first link has 1 byte per second more than 1e11, the next one 2."""
    asked: list[str] = []

    def run(function: str, bound_s: float, *arguments: str) -> str:
        asked.append(function)
        of_machine = replace(TYPICAL_GPU, machine=this_machine("cuda"), launch_s=0.5)
        return of_machine.to_json() if function == "main" else f"{1e11 + asked.count('link')}\n"

    monkeypatch.setattr("megatrain_ray.profiles._run", run)
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
    """Of those that are visible, also where the rest was measured before, or is measured anew."""
    assert measured(GPU, "auto", Startup()).rates.gpu_link_bytes_per_s is None
    assert done == ["main"]
    assert link_of_two() == link_of_two() == 1e11 + 1
    visible.append(FIRST_AND_UNKNOWN)
    assert link_of_two() == 1e11 + 2
    visible.append((*FIRST_TWO, "0000:3a:00.0"))
    assert link_of_two() == 1e11 + 1
    assert done == ["main", "link", "link"]
    profile_file(this_machine("cuda")).unlink()
    assert link_of_two() == 1e11 + 1
    assert done == ["main", "link", "link", "main"]
    for kept in tmp_path.glob("**/*.links/*.json"):
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
        patch.setattr("megatrain_ray.profiles._run", fail)
        assert (link_of_two(), link_of_two()) == (None, None)
        assert done == ["main", "link"] + ["link"] * (error is MegatrainError)
        assert ("hung when their link was measured" in caplog.text) == (error is DeadlineError)
    monkeypatch.setattr("megatrain_ray.profiles.num_gpus", lambda: 4)
    visible.append((*FIRST_TWO, "0000:3a:00.0", "0000:4a:00.0"))
    assert measure_everything("cuda").gpu_link_bytes_per_s is not None
    link = link_of_two()
    assert link is not None
    monkeypatch.setattr("megatrain_ray.profiles._run", fail)
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
    monkeypatch.setattr(measuring, "PeerCopies", Copies)
    monkeypatch.setattr(measuring, "measure_link", rate)
    measuring.link()
    assert made == [(8, *pair) for pair in pairs]
    assert float(capsys.readouterr().out) == (10.0 if count > 2 else 11.0)


def test_a_plan_is_made_with_the_rates_of_a_file(tmp_path: Path) -> None:
    """A machine that one does not have; the plan says whose rates they are."""
    file = tmp_path / "profile.json"
    named = replace(TYPICAL_GPU, machine=MachineName("B300", "", "", "core", 64), launch_s=1e-3)
    file.write_text(named.to_json())
    shape = LLAMA | {"max_position_embeddings": 64}

    def plan(**hardware: object) -> str:
        tree = config(tmp_path, shape, **{f"hardware__{key}": value for key, value in hardware.items()})
        made = question_of(TrainConfig.model_validate(tree)).plan()
        assert made.prediction is not None
        return describe(made)

    imagined = {"device": "cuda", "hbm_limit": "24GiB", "ram_limit": "64GiB"}
    assert plan(**imagined, profile=str(file)).splitlines()[-1].strip() == "rates of B300, 64 × core"
    assert "built-in rates, as nobody measured this machine: NVIDIA H200" in plan(**imagined)
    assert "bound by compute" in plan(**imagined, profile=str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read {}: "),
        ("{", "{} is no profile: the file: "),
        ("{}", "{} is no profile: version: Field required"),
        (json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"copy_s": -1}), "{} is no profile: copy_s: "),
        (
            json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"disk_bytes_per_s": 0}),
            "{} is no profile: disk_bytes_per_s: ",
        ),
        # With such rates seconds are infinite, or divided by 0.
        (
            json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"both_bytes_per_s": 1e-300}),
            "{} is no profile: both_bytes_per_s: ",
        ),
        (
            json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"attention": [{"size": 1e300, "per_s": 1e-20}]}),
            "{} is no profile: attention.0.size: ",
        ),
        (json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"launch_s": 1e300}), "{} is no profile: launch_s: "),
        (json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"matmul": {}}), "{} is no profile: matmul: "),
        (json.dumps(json.loads(TYPICAL_CPU.to_json()) | {"version": 2}), "{} is no profile: version: "),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "profile.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as info:
        with_profile(CPU, str(file))
    assert str(info.value).startswith(f"hardware.profile: {message.format(file)}")
    assert info.value.exit_code == 2


def test_a_profile_may_say_how_fast_the_disk_is() -> None:
    """One that was kept before there was such a rate does not."""
    named = replace(TYPICAL_CPU, disk_bytes_per_s=2e9)
    assert HardwareProfile.from_json(named.to_json()) == named
    tree = json.loads(named.to_json())
    del tree["disk_bytes_per_s"]
    assert HardwareProfile.from_json(json.dumps(tree)) == TYPICAL_CPU


def test_what_was_measured_here_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something of the machine changes. A damaged file is left out; none is used for a GPU that is not here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = this_machine("cpu")
    assert with_profile(CPU, "auto").profile is None
    file = profile_file(machine)
    file.parent.mkdir(parents=True)
    file.write_text(replace(TYPICAL_CPU, machine=machine, launch_s=0.5).to_json())
    assert with_profile(CPU, "auto").rates.launch_s == 0.5
    assert with_profile(GPU, "auto").rates is TYPICAL_GPU
    assert cached(replace(machine, torch="another"), 1) is None
    file.write_text("{")
    assert with_profile(CPU, "auto").rates is TYPICAL_CPU


def test_a_gpu_that_cannot_be_measured_is_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the process that measures
    monkeypatch.setattr("megatrain_ray.profiles.total_memory_bytes", lambda: 24 << 30)
    monkeypatch.setattr("megatrain_ray.profiles.device_name", lambda: "some GPU")
    with pytest.raises(MegatrainError, match="this machine could not be measured: exit code 1: "):
        measure_here("cuda")
    assert measured(GPU, "auto", Startup()).rates is TYPICAL_GPU
    assert list(tmp_path.glob("**/*.json")) == []


@pytest.mark.parametrize(("count", "link"), [(1, None), (2, 3e11)])
def test_the_link_is_measured_with_everything_else(
    count: int, link: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are several GPUs. Of those that do not reach each other the rest is known."""
    alone = replace(TYPICAL_GPU, gpu_link_bytes_per_s=None)
    monkeypatch.setattr("megatrain_ray.profiles.num_gpus", lambda: count)
    monkeypatch.setattr("megatrain_ray.profiles.measure_here", lambda device: alone)
    monkeypatch.setattr(
        "megatrain_ray.profiles.measure_link_here", lambda profile, count: replace(profile, gpu_link_bytes_per_s=3e11)
    )
    assert measure_everything("cuda").gpu_link_bytes_per_s == link

    def fail(profile: object, count: int) -> None:
        raise MegatrainError("they do not meet")

    monkeypatch.setattr("megatrain_ray.profiles.measure_link_here", fail)
    assert measure_everything("cuda") == alone


def test_names_of_what_is_in_a_machine(tmp_path: Path) -> None:
    for name, text in {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Some CPU @ 2 GHz\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\nGCC version 12\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (cpu_name(tmp_path), driver_version(tmp_path)) == ("Some CPU @ 2 GHz", "570.86.15")
    assert (cpu_name(tmp_path / "none"), driver_version(tmp_path / "none")) == ("", "")
