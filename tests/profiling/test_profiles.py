"""Hardware profiles: measured through the device seam, kept, read from files, refused where they are none."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.startup import Startup
from megatrain_ray.engine.device.cards import rates_of
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU, TYPICAL_GPU, HardwareProfile, MachineName
from megatrain_ray.engine.measure.measure_profile import measure
from megatrain_ray.engine.measure.timing import Effort
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.machine.machine import cpu_name, driver_version
from megatrain_ray.planning.run_spec import planning_problem
from megatrain_ray.profiling.profiles import (
    cached,
    keep,
    measure_here,
    measured,
    profile_file,
    this_machine,
    with_profile,
)
from tests.planning.test_planning import LLAMA
from tests.support.disk_faults import DiskCall, Moments, disk_calls
from tests.support.runs import config

GPU = Machine(device="cuda", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=24 << 30)
CPU = replace(GPU, device="cpu", hbm_bytes=None)
LITTLE = Effort(
    budget_s=0.0,
    warm_s=0.0,
    sustained_s=0.0,
    slow_s=1e9,
    elements=1 << 16,
    copy_bytes=1 << 16,
    device_bytes=1 << 16,
    widths=(8, 16),
    lengths=(8,),
)


def test_the_cpu_device_yields_a_profile() -> None:
    machine = MachineName("", "", "2", "some", 2)
    profile = measure(machine, lambda _: CpuDevice(num_threads=1), 2, LITTLE)
    assert profile.machine == machine
    assert [point.size for point in profile.matmul["bf16"]] == [2.0 * 8**3, 2.0 * 16**3]
    assert set(profile.matmul) == {"bf16", "fp32", "tf32"}
    assert profile.adamw_busy_per_s <= profile.adamw_per_s
    assert profile.gpu_link_bytes_per_s is None
    assert profile.grouped is None
    assert profile.busy_h2d_bytes_per_s > 0 < profile.busy_d2h_bytes_per_s


def test_a_plan_is_made_with_the_rates_of_a_file(tmp_path: Path) -> None:
    """A machine that one does not have; the plan says whose rates they are."""
    file = tmp_path / "profile.json"
    named = replace(TYPICAL_GPU, machine=MachineName("B300", "", "", "core", 64), launch_s=1e-3)
    file.write_text(named.to_json())
    shape = LLAMA | {"max_position_embeddings": 64}

    def plan(**hardware: object) -> str:
        tree = config(tmp_path, shape, **{f"hardware__{key}": value for key, value in hardware.items()})
        made = planning_problem(TrainConfig.model_validate(tree)).plan()
        assert made.prediction is not None
        return describe(made)

    imagined = {"device": "cuda", "hbm_limit": "24GiB", "ram_limit": "64GiB"}
    assert plan(**imagined, profile=str(file)).splitlines()[-1].strip() == "rates of B300, 64 × core"
    assert "built-in rates, as nobody measured this machine: GeForce RTX 4090" in plan(**imagined)
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
    """It is found until something of the machine changes.

    A damaged file is left out; none is used for an absent GPU.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = this_machine("cpu")
    assert with_profile(CPU, "auto").profile is None
    file = profile_file(machine)
    file.parent.mkdir(parents=True)
    file.write_text(replace(TYPICAL_CPU, machine=machine, launch_s=0.5).to_json())
    assert with_profile(CPU, "auto").rates.launch_s == 0.5
    assert with_profile(GPU, "auto").rates == rates_of("rtx4090")
    assert cached(replace(machine, torch="another"), 1) is None
    file.write_text("{")
    assert with_profile(CPU, "auto").rates is TYPICAL_CPU


def test_a_gpu_that_cannot_be_measured_is_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the process that measures
    monkeypatch.setattr("megatrain_ray.profiling.profiles.total_memory_bytes", lambda: 24 << 30)
    monkeypatch.setattr("megatrain_ray.profiling.profiles.device_name", lambda: "some GPU")
    with pytest.raises(MegatrainError, match="this machine could not be measured: exit code 1: "):
        measure_here("cuda")
    assert measured(GPU, "auto", Startup()).rates == rates_of("rtx4090")
    assert list(tmp_path.glob("**/*.json")) == []


def test_names_of_what_is_in_a_machine(tmp_path: Path) -> None:
    for name, text in {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Some CPU @ 2 GHz\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\nGCC version 12\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (cpu_name(tmp_path), driver_version(tmp_path)) == ("Some CPU @ 2 GHz", "570.86.15")
    assert (cpu_name(tmp_path / "none"), driver_version(tmp_path / "none")) == ("", "")


def test_a_measurement_that_cannot_be_written_or_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    calls: list[DiskCall] = []
    moments = Moments(home, tmp_path / "moments")

    def see(call: DiskCall) -> None:
        calls.append(call)
        moments(call)

    keep(lambda: home / "a" / "rates.json", "old")
    with disk_calls(home, see):
        keep(lambda: home / "a" / "rates.json", "new")
    assert len(moments.all) > 3
    assert {(folder / "a" / "rates.json").read_text() for _, folder in moments.all} == {"old", "new"}
    for failing in dict.fromkeys(calls):
        keep(lambda: home / "a" / "rates.json", "old")

        def fail(call: DiskCall, failing: DiskCall = failing) -> None:
            if call == failing:
                raise OSError(errno.ENOSPC, "full", call.path)

        with disk_calls(home, fail):
            keep(lambda: home / "a" / "rates.json", "new")
        assert (home / "a" / "rates.json").read_text() in ("old", "new"), failing
        assert [path.name for path in (home / "a").iterdir()] == ["rates.json"], failing
