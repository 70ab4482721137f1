"""Finds the hardware profile of a run: in a file of the user's, in the cache, or by a measurement that fills the cache.

A measurement runs in a process of its own, which owns the device meanwhile: the driver never creates a context on the
GPU. On the CPU device nothing is measured unless `megatrain doctor --measure` asks for it.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from megatrain_ray.console.startup import Startup
from megatrain_ray.engine.device.cards import card_for, cards, rates_of
from megatrain_ray.engine.device.cuda_info import device_name, num_gpus, pci_addresses, total_memory_bytes
from megatrain_ray.engine.device.hardware_profile import HardwareProfile, MachineName, Rate
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError, DeadlineError, MegatrainError
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.machine.machine import allowed_cpus, cpu_name, driver_version
from megatrain_ray.read_file import regular_file

log = logging.getLogger(__name__)

AUTO = "auto"
LINKS = ".links.json"  # suffix of the file of a machine's links, beside its profile
MEASURE_S = 300.0  # time limit of a measurement
LINK_S = 60.0  # time limit for the link, which may hang if GPUs cannot access each other's memory,
PAIR_S = 10.0  # plus this for each GPU
NO_PARTS = "nothing is uploaded in parts by itself; megatrain doctor --measure tries again"


# Bytes per second by set of GPUs: some GPUs of a machine may be linked directly and others not. None: the measurement
# hung and is not to be repeated.
Links = Mapping[str, Rate | None]
_LINKS: TypeAdapter[Links] = TypeAdapter(dict[str, Rate | None])


def this_machine(device: str) -> MachineName:
    """Return the name of this machine, which identifies its profile. `device` is cpu or cuda."""
    gpu = device == "cuda"
    return MachineName(
        gpu=device_name() if gpu else "",
        driver=driver_version() if gpu else "",
        torch=torch.__version__,
        cpu=cpu_name(),
        num_cpus=allowed_cpus(),
    )


def profile_file(machine: MachineName) -> Path:
    """Return the path of a machine's profile in the cache. Raises RuntimeError if there is no cache."""
    key = hashlib.sha256(TypeAdapter(MachineName).dump_json(machine)).hexdigest()[:12]
    return cache_folder() / "profiles" / f"{key}.json"


def with_profile(machine: Machine, setting: str, host_gpus: int = 1) -> Machine:
    """Return the machine with the rates of its hardware profile. Nothing is measured.

    setting: value of hardware.profile: path of a profile, name of a card, or auto for the rates in the cache. Where
        there are none, built-in rates are those of the card with that much memory.
    host_gpus: GPUs of the run on this host; the rate of the link between them is included.

    Raises ConfigError if the file does not exist or is no profile.
    """
    if (named := setting in cards()) or setting == AUTO:
        if machine.device == "cuda":
            name = setting if named else card_for(machine.hbm_bytes or 0)
            machine = replace(machine, card=rates_of(name))
        if named or (machine.device == "cuda" and total_memory_bytes() is None):
            return machine  # the plan is for a GPU that is not here
        return replace(machine, profile=cached(this_machine(machine.device), host_gpus))
    return replace(machine, profile=read_profile(Path(setting)))


def measured(machine: Machine, setting: str, startup: Startup, host_gpus: int = 1) -> Machine:
    """Return the machine as `with_profile` does, for a run, and measure first what the cache lacks.

    A failed measurement is logged and does not prevent the training.
    """
    machine = with_profile(machine, setting, host_gpus)
    if machine.device != "cuda" or setting != AUTO:
        return machine
    profile = machine.profile
    try:
        if profile is None:
            with startup.phase("measuring this machine, which is done once"):
                profile = _with_link(measure_here(machine.device), host_gpus)
        if _num_gpus(host_gpus) > 1:  # fewer if the driver does not see the cluster's GPUs
            profile = _with_measured_link(profile, startup, host_gpus)
    except MegatrainError as error:
        log.warning("%s; %s", error, NO_PARTS if profile else "plans are made with built-in rates")
    return replace(machine, profile=profile)


def _with_measured_link(profile: HardwareProfile, startup: Startup, host_gpus: int) -> HardwareProfile:
    gpus, links = _gpus(host_gpus), _links(profile.machine)
    if gpus not in links:
        with startup.phase("measuring the link between GPUs, which is done once"):
            return measure_link_here(profile, host_gpus)
    if links[gpus] is None:
        log.warning("the GPUs %s hung when their link was measured; %s", gpus.replace(" ", ", "), NO_PARTS)
    return profile


def check_profile(setting: str) -> None:
    """Raise ConfigError unless hardware.profile is auto, the name of a card, or the path of a profile."""
    if setting != AUTO and setting not in cards():
        read_profile(Path(setting))


def read_profile(path: Path) -> HardwareProfile:
    """Read a profile. Raises ConfigError if the file cannot be read or is no profile."""
    try:
        return HardwareProfile.from_json(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        names, why = ", ".join(cards()), getattr(error, "strerror", None) or error
        raise ConfigError(
            f"hardware.profile: cannot read {path}: {why}; give auto, a profile's file, or a card: {names}"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"hardware.profile: {path} is no profile: {where}: {first['msg']}") from None


def cached(machine: MachineName, host_gpus: int) -> HardwareProfile | None:
    """Return the machine's profile from the cache, with the link between `host_gpus` GPUs.

    Return None if nothing was measured or the file is damaged.
    """
    try:
        file = profile_file(machine)
        profile = read_profile(file) if file.exists() else None
    except (RuntimeError, ConfigError) as error:
        log.warning("measured rates are left out: %s", error)
        return None
    return profile and _with_link(profile, host_gpus)


def _with_link(profile: HardwareProfile, host_gpus: int) -> HardwareProfile:
    rate = _links(profile.machine).get(_gpus(host_gpus)) if host_gpus > 1 else None
    return replace(profile, gpu_link_bytes_per_s=rate)


def _links(machine: MachineName) -> Links:
    """Return the kept links between GPUs; none if there is no cache, or the file is missing or damaged."""
    with suppress(RuntimeError):
        file = profile_file(machine).with_suffix(LINKS)
        try:
            return _LINKS.validate_json(file.read_bytes()) if file.exists() else {}
        except (OSError, ValidationError) as error:
            log.warning("measured links between GPUs are left out: cannot read %s: %s", file, error)
    return {}


def _num_gpus(count: int) -> int:
    return min(count, len(pci_addresses()))


def _gpus(count: int) -> str:
    """Return the name of the set of GPUs that Ray assigns to a run on an embedded Ray: the first visible ones.

    It consists of PCI addresses, or else indices, in the order in which a process sees them.
    """
    return " ".join(address or str(index) for index, address in enumerate(pci_addresses()[:count]))


def measure_here(device: str) -> HardwareProfile:
    """Measure this machine in a process of its own and keep the result. Raises MegatrainError if that fails."""
    profile = HardwareProfile.from_json(_run("print_profile", MEASURE_S, device))
    keep(lambda: profile_file(profile.machine), profile.to_json())
    return profile


def measure_everything(device: str) -> HardwareProfile:
    """Measure this machine and the link between its GPUs, if there are several, and keep the results.

    Raises MegatrainError if the machine cannot be measured. A link that cannot be measured is logged.
    """
    profile = measure_here(device)
    if device == "cuda" and num_gpus() > 1:
        measured_links = {gpus: rate for gpus, rate in _links(profile.machine).items() if rate is not None}
        _keep_links(profile.machine, measured_links)  # those that hung are measured again
        try:
            return measure_link_here(profile, num_gpus())
        except MegatrainError as error:
            log.warning("%s", error)
    return profile


def measure_link_here(profile: HardwareProfile, host_gpus: int) -> HardwareProfile:
    """Return `profile` with the rate of the slowest link between neighbours of the first `host_gpus` visible GPUs.

    It is measured in a process of its own and kept for these GPUs.

    Raises DeadlineError if the measurement hangs, which is also kept unless a rate is known. Raises MegatrainError if
    it fails otherwise.
    """
    count, gpus, links = _num_gpus(host_gpus), _gpus(host_gpus), _links(profile.machine)
    try:
        bytes_per_s = float(_run("print_link", LINK_S + PAIR_S * count, str(count)))
    except DeadlineError:
        if gpus not in links:
            _keep_links(profile.machine, {**links, gpus: None})
        raise
    _keep_links(profile.machine, {**links, gpus: bytes_per_s})
    return replace(profile, gpu_link_bytes_per_s=bytes_per_s)


def _keep_links(machine: MachineName, links: Links) -> None:
    keep(lambda: profile_file(machine).with_suffix(LINKS), _LINKS.dump_json(links, indent=1).decode() + "\n")


def _run(function: str, bound_s: float, *arguments: str) -> str:
    """Run a function of measure_process.py in a process of its own and return what it prints.

    Raises DeadlineError if it takes longer than `bound_s` seconds, and MegatrainError if it fails.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from megatrain_ray.profiling import measure_process; measure_process.{function}()"
    )
    what = "this machine" if function == "print_profile" else "the link between GPUs"
    try:
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=bound_s)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{what} was not measured within {bound_s:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise MegatrainError(f"{what} could not be measured: exit code {done.returncode}: {last}")
    return done.stdout


def keep(path: Callable[[], Path], text: str) -> None:
    """Write a measurement to the cache. A failure is only logged: this run can use the measurement all the same.

    path: returns the file, or raises RuntimeError if there is no cache.
    """
    try:
        file = path()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except (OSError, RuntimeError, MegatrainError) as error:
        log.warning("what was measured is not kept: %s", error)


def describe_profile(profile: HardwareProfile) -> str:
    """Return the most important rates in one line."""
    products = max(point.per_s for point in profile.matmul.get("bf16", next(iter(profile.matmul.values()))))
    link = profile.gpu_link_bytes_per_s
    between = f"; {link / 1e9:.3g} GB/s each way between GPUs" if link else ""
    return (
        f"copies {profile.h2d_bytes_per_s / 1e9:.3g} GB/s up, {profile.d2h_bytes_per_s / 1e9:.3g} down, "
        f"{profile.both_bytes_per_s / 1e9:.3g} each way at once; host memory {profile.triad_bytes_per_s / 1e9:.3g} "
        f"GB/s; AdamW {profile.adamw_per_s / 1e9:.3g} Gparam/s, {profile.adamw_busy_per_s / 1e9:.3g} beside copies; "
        f"products {products / 1e12:.3g} TFLOPS{between}"
    )
