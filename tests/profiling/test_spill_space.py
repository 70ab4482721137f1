"""spill.path and spill.limit: what a plan is told of the disk, measured once."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray import trainer, training_run
from megatrain_ray.config.groups import SpillConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import override
from megatrain_ray.console.startup import Startup
from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU, TYPICAL_DISK_BYTES_PER_S
from megatrain_ray.engine.planner.request import ANY_ROOM, Machine, SpillSpace
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay
from megatrain_ray.planning.run_spec import planning_problem, prepare
from megatrain_ray.profiling import spill_disk
from megatrain_ray.profiling.spill_disk import MARGIN_BYTES, forget_rates, rate_file, with_spill
from megatrain_ray.start_of_run import measured_machine
from tests.planning.test_planning import LLAMA
from tests.support.runs import config
from tests.support.spill_folders import FREE, MACHINE, RATE, imitated_disks, space

BOTH = {"posix": RATE, "posix with zstd": RATE}


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    return imitated_disks(monkeypatch, tmp_path / "cache")


def test_nothing_is_spilled_without_a_path(measurements: list[Path]) -> None:
    assert with_spill(MACHINE, SpillConfig()) is MACHINE
    assert measurements == []


@pytest.mark.parametrize(
    ("limit", "free", "limit_bytes"),
    [
        (None, FREE, FREE - MARGIN_BYTES),
        ("2GB", FREE, 2 * 10**9),
        ("1TB", FREE, FREE - MARGIN_BYTES),
        (None, MARGIN_BYTES - 1, 0),
    ],
)
def test_a_run_may_use_what_is_free_and_no_more_than_the_limit(
    tmp_path: Path, measurements: list[Path], monkeypatch: pytest.MonkeyPatch,
    limit: str | None, free: int, limit_bytes: int,
) -> None:  # fmt: skip
    """A disk that is full is not measured."""
    monkeypatch.setattr(spill_disk, "free_bytes", lambda folder: free)
    folder = tmp_path / "a" / "b"
    found = space(folder, limit)
    assert found == SpillSpace(limit_bytes, RATE if limit_bytes else TYPICAL_DISK_BYTES_PER_S)
    assert list(folder.iterdir()) == []


def test_a_disk_is_measured_once(
    tmp_path: Path, measurements: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk is measured again only when the folder is on another file system.

    The rate that is kept holds for a plan without the folder. A relative path starts at the working directory.
    """
    folder, other = tmp_path / "nvme", tmp_path / "other"
    monkeypatch.chdir(tmp_path)
    for path in (Path("nvme"), folder, other, folder):
        assert space(path).bytes_per_s == RATE
    assert measurements == [folder, other]
    assert capsys.readouterr().err.splitlines() == [
        f"measured the disk of {path}, which is done once: 2.50 GB/s by posix, 2.50 GB/s by posix with zstd, read and "
        "written at the same time"
        for path in (folder, other)
    ]
    kept = json.loads(rate_file(folder).read_text())
    device = folder.stat().st_dev
    assert kept == {"version": 2, "folder": str(folder), "device": device, "bytes_per_s": BOTH}
    rate_file(folder).write_text(json.dumps(kept | {"bytes_per_s": dict.fromkeys(BOTH, 1.5e9)}))
    folder.rmdir()
    assert space(folder, imagined=True) == SpillSpace(ANY_ROOM, 1.5e9)
    monkeypatch.setattr(spill_disk, "_device_of", lambda folder: 12345)
    assert space(folder).bytes_per_s == RATE
    assert measurements == [folder, other, folder]


@pytest.mark.parametrize("change", [{"version": 1}, {"bytes_per_s": BOTH | {"posix": 0.0}}])
def test_what_is_kept_and_cannot_be_used_is_measured_again(
    tmp_path: Path, measurements: list[Path], change: dict[str, Any]
) -> None:
    space(tmp_path)
    file = rate_file(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert space(tmp_path).bytes_per_s == RATE
    assert measurements == [tmp_path, tmp_path]


def test_what_is_forgotten_is_measured_again(tmp_path: Path, measurements: list[Path]) -> None:
    forget_rates()  # nothing is there
    for _ in range(2):
        space(tmp_path / "nvme")
        space(tmp_path / "nvme")
        forget_rates()
    assert measurements == [tmp_path / "nvme"] * 2


def test_a_rate_of_the_profile_is_taken(tmp_path: Path, measurements: list[Path]) -> None:
    assert space(tmp_path, rate=1e9).bytes_per_s == 1e9
    assert space(tmp_path / "none", imagined=True, rate=1e9).bytes_per_s == 1e9
    assert measurements == []
    assert not (tmp_path / "cache").exists()


def test_a_disk_that_cannot_be_measured_is_trained_on(
    tmp_path: Path, measurements: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path, num_bytes: int, way: DiskWay) -> float:
        raise MegatrainError("the disk is stuck")

    monkeypatch.setattr(spill_disk, "measure_mixed", fail)
    assert space(tmp_path).bytes_per_s == TYPICAL_DISK_BYTES_PER_S
    assert caplog.messages[-1] == "spill.path is taken to be on a typical NVMe drive: the disk is stuck"
    assert not rate_file(tmp_path).exists()


def test_a_disk_is_measured_where_nothing_can_be_kept(
    tmp_path: Path, measurements: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(spill_disk, "cache_folder", no_home)
    assert space(tmp_path).bytes_per_s == RATE


POSIX, KVIKIO = DiskIo.POSIX, DiskIo.KVIKIO
RATES = {DiskWay(POSIX): 2e9, DiskWay(POSIX, True): 3e9, DiskWay(KVIKIO): 4e9, DiskWay(KVIKIO, True): 5e9}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DiskWay]:
    """Return a list that fills with the ways that are measured; kvikio is installed and works."""
    measured: list[DiskWay] = []

    def measure(folder: Path, num_bytes: int, way: DiskWay) -> float:
        measured.append(way)
        return RATES[way]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(spill_disk, "measure_mixed", measure)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "kvikio" or None)
    monkeypatch.setattr(spill_disk, "unusable", lambda folder: None)
    return measured


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ((2.0, 2.2, 2.4, 2.6), DiskWay(KVIKIO, True)),
        ((2.0, 2.2, 2.4, 2.45), DiskWay(KVIKIO)),
        ((2.0, 2.2, 2.25, 2.3), DiskWay(POSIX, True)),
        ((2.0, 2.05, 2.05, 1.0), DiskWay(POSIX)),
    ],
)
def test_the_fastest_way_is_taken(
    tmp_path: Path, ways: list[DiskWay], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    rates: Sequence[float], best: DiskWay,
) -> None:  # fmt: skip
    """A simpler way is taken if the fastest is ahead by less than two measurements differ."""
    for way, rate in zip(RATES, rates, strict=True):
        monkeypatch.setitem(RATES, way, rate * 1e9)
    for _ in range(2):
        found = space(tmp_path / "nvme")
        assert (found.way, found.bytes_per_s) == (best, RATES[best])
    assert ways == [*RATES]
    said = ", ".join(f"{rate:.2f} GB/s by {way}" for way, rate in zip(RATES, rates, strict=True))
    said = f"which is done once: {said}, read and written at the same time\n"
    assert capsys.readouterr().err == f"measured the disk of {tmp_path / 'nvme'}, {said}"


@pytest.mark.parametrize("way", RATES, ids=str)
def test_the_way_that_is_asked_for_is_taken(tmp_path: Path, ways: list[DiskWay], way: DiskWay) -> None:
    asked = {"io": way.io.value, "compression": "zstd" if way.packed else "none"}
    found = space(tmp_path / "nvme", 5, **asked)
    assert (found.way, found.bytes_per_s) == (way, RATES[way])
    assert found.plain_bytes_per_s == (RATES[DiskWay(way.io)] if way.packed else None)
    assert not found.may_be_unpacked
    assert space(tmp_path / "nvme", 5, rate=1e9, **asked) == replace(found, bytes_per_s=1e9, plain_bytes_per_s=None)
    assert space(tmp_path / "none", imagined=True, **asked).way == way
    assert ways == ([DiskWay(way.io), way] if way.packed else [way])


def test_where_packing_was_chosen_activations_have_a_rate_of_their_own(tmp_path: Path, ways: list[DiskWay]) -> None:
    """That of the same library without it, which is what is left where it is given up."""
    found = space(tmp_path / "nvme")
    assert found == SpillSpace(found.limit_bytes, 5e9, DiskWay(KVIKIO, True), 4e9, may_be_unpacked=True)
    assert found.unpacked == SpillSpace(found.limit_bytes, 4e9, DiskWay(KVIKIO))


@pytest.mark.parametrize(
    ("compression", "rates", "way", "expected"),
    [
        ("auto", (3e9, 2e9), DiskWay(POSIX, True), (3e9, 2e9, True)),
        ("auto", (2e9, 2e9), DiskWay(POSIX), (2e9, None, False)),
        ("none", (3e9, 2e9), DiskWay(POSIX), (2e9, None, False)),
        ("zstd", (2e9, 3e9), DiskWay(POSIX, True), (2e9, 3e9, False)),
        ("zstd", (2e9, None), DiskWay(POSIX, True), (2e9, None, False)),
    ],
)
def test_a_profile_may_have_both_rates(
    tmp_path: Path, measurements: list[Path], compression: str, rates: tuple[float, float | None], way: DiskWay,
    expected: tuple[float, float | None, bool],
) -> None:  # fmt: skip
    """Those that `megatrain refit` writes of a run that packed."""
    profile = replace(TYPICAL_CPU, disk_bytes_per_s=rates[0], disk_plain_bytes_per_s=rates[1])
    spill = SpillConfig.model_validate({"path": str(tmp_path), "compression": compression})
    found = with_spill(replace(MACHINE, profile=profile), spill).spill
    assert found is not None
    assert found.way == way
    assert (found.bytes_per_s, found.plain_bytes_per_s, found.may_be_unpacked) == expected
    assert measurements == []


def test_what_was_installed_since_is_measured(
    tmp_path: Path, ways: list[DiskWay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured still holds when the library is gone."""
    with monkeypatch.context() as changed:
        changed.setattr(importlib.util, "find_spec", lambda name: None)
        assert space(tmp_path).way == DiskWay(POSIX, True)
    assert space(tmp_path).way == DiskWay(KVIKIO, True)
    monkeypatch.setattr(spill_disk, "unusable", lambda folder: "no driver")
    assert space(tmp_path).way == DiskWay(POSIX, True)
    assert ways == [DiskWay(POSIX), DiskWay(POSIX, True), *RATES]


def test_kvikio_that_does_not_work(
    tmp_path: Path, ways: list[DiskWay], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, and an error where it is asked for."""
    monkeypatch.setattr(spill_disk, "unusable", lambda folder: "no driver")
    assert space(tmp_path).way.io is POSIX
    assert caplog.messages == ["kvikio is installed and not used for spill.path: no driver"]
    needs = "docs/hardware_profile.md says what it needs, auto and posix do without"
    message = f"spill.io: kvikio does not work for {tmp_path}: no driver; {needs}"
    with pytest.raises(ConfigError) as info:
        space(tmp_path, io="kvikio")
    assert (str(info.value), info.value.exit_code) == (message, 2)


def test_a_small_measurement_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(spill_disk, "PROBE_BYTES", aligned(1))
    found = space(tmp_path / "nvme", 5)
    assert found.bytes_per_s > 0
    assert space(tmp_path / "nvme", 5) == found


def test_a_plan_alone_makes_no_folder(tmp_path: Path, measurements: list[Path]) -> None:
    """One that is not here has a typical drive; one that is here is measured."""
    assert space(tmp_path / "nvme", imagined=True) == SpillSpace(ANY_ROOM, TYPICAL_DISK_BYTES_PER_S)
    assert space(tmp_path / "nvme", "1TB", imagined=True).limit_bytes == 10**12
    assert space(Path("/proc/none"), imagined=True).limit_bytes == ANY_ROOM
    assert not (tmp_path / "nvme").exists()
    assert space(tmp_path, imagined=True) == SpillSpace(FREE - MARGIN_BYTES, RATE)
    assert measurements == [tmp_path]


def settings(folder: Path, path: Path) -> TrainConfig:
    tree = config(folder / "run", LLAMA, hardware__ram_limit="64GiB", spill__path=str(path), spill__limit="2GB")
    return TrainConfig.model_validate(tree)


MACHINES: dict[str, Callable[[TrainConfig], Machine]] = {
    "plan": lambda config: planning_problem(config).machine,
    "train": lambda config: measured_machine(config, Startup()),
}


@pytest.mark.parametrize("command", MACHINES)
def test_plans_and_runs_are_told(tmp_path: Path, measurements: list[Path], command: str) -> None:
    """A run makes the folder and measures its disk."""
    folder = tmp_path / "nvme"
    spill = MACHINES[command](settings(tmp_path, folder)).spill
    is_run = command == "train"
    assert spill == SpillSpace(2 * 10**9, RATE if is_run else TYPICAL_DISK_BYTES_PER_S)
    assert measurements == [folder] * is_run
    assert folder.exists() == is_run


def test_what_is_prepared_by_itself_is_a_run(tmp_path: Path, measurements: list[Path]) -> None:
    prepare(settings(tmp_path, tmp_path / "nvme"))
    assert measurements == [tmp_path / "nvme"]


def test_a_run_with_a_wrong_path_ends_before_any_process_starts(
    tmp_path: Path, measurements: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "ray_processes", None)
    with pytest.raises(ConfigError, match=r"spill\.path: cannot write to /proc/none: "):
        trainer.Trainer(args=settings(tmp_path, Path("/proc/none"))).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["run_dir", "spill.path"])
def test_a_ray_job_takes_absolute_paths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(training_run, "in_ray_job", lambda: True)
    tree = config(tmp_path / "run", LLAMA, spill__path=str(tmp_path / "nvme"))
    override(tree, f"{key}=relative")
    with pytest.raises(ConfigError, match=rf"^{key}: relative is relative, and a Ray job runs in a folder of its own"):
        trainer.Trainer(args=tree).train()
