"""Connects a run to Ray: to an existing cluster if there is one, else to an embedded one that leaves nothing behind."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
from ray._private.services import find_bootstrap_address

from megatrain_ray.console.interrupts import ENDINGS
from megatrain_ray.crew.ray_daemons import END_TIMEOUT_S, Daemons, end_processes, started_since, with_children
from megatrain_ray.crew.ray_patches import DriverPaths, ended_by, is_on_loopback, on_loopback, without_helpers
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import CapacityError, MegatrainError
from megatrain_ray.io.files.owned_folder import FolderKind, NotOwnedError, OwnedFolder, remove_owned, why_not_owned
from megatrain_ray.machine.machine import free_threads

# Only batches and metrics go there. By default Ray would claim 30 % of RAM, which the arenas need.
OBJECT_STORE_BYTES = 128 << 20

# Threads of a run's own Ray with its driver, and of each process that Ray starts for the run, as measured on two cores
# (more cores need more). Without them Ray aborts this process.
RAY_THREADS = 140
PROCESS_THREADS = 25

JOB_MARKER = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray's job supervisor for the driver it starts

# Read by the processes that ray.init starts. The memory monitor counts arenas as used memory and kills actors for it.
# At Ray's default niceness of 15 any other process starves a worker: with one busy process on the machine, 25 steps of
# examples/tiny_llama.yaml took 48 s, and 34 s at niceness 0.
EMBEDDED_ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Seconds that Ray's processes go on without their head (60 by default). They outlive a killed driver by that.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}

SESSIONS = Path("/tmp")  # not the run directory: a socket's path must stay under 107 bytes
SESSION_PREFIX = "megatrain-"


def in_ray_job() -> bool:
    """Return whether this process is the entrypoint of `ray job submit`."""
    return JOB_MARKER in os.environ


def joins_cluster() -> bool:
    """Return whether `cluster` joins a cluster that exists already."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS")) or in_ray_job()


@contextmanager
def cluster(num_cpus: int, num_gpus: int) -> Iterator[Daemons]:
    """Connect this process to Ray for the block.

    An existing connection stays as it is. Otherwise, inside `ray job submit` or with RAY_ADDRESS set, that cluster is
    joined. Otherwise an embedded cluster is started with that many CPUs (and worker processes for actors) and GPUs; its
    processes, session folder and shared memory are gone afterwards.
    """
    if ray.is_initialized():
        yield Daemons()
    elif joins_cluster():
        _connect(os.environ.get("RAY_ADDRESS", ""))
        try:
            yield Daemons()
        finally:
            ray.shutdown()
    else:
        with _embedded(num_cpus, num_gpus) as daemons:
            yield daemons


def _connect(address: str) -> None:
    """Join the cluster at `address`. Raises MegatrainError if no cluster answers.

    This asks the address before Ray does, since Ray would try for minutes.
    """
    problem = f"cannot connect to the Ray cluster {address or 'of this job'}"
    if address == "auto" and (found := find_bootstrap_address(None)):  # of the last `ray start` on this machine
        address, problem = found, f"{problem} ({found})"
    advice = "start it, correct RAY_ADDRESS, or unset it for a cluster of the run's own"
    host, _, port = address.rpartition(":")
    network: AbstractContextManager[None] = nullcontext()
    if host and port.isdigit() and "//" not in host:
        try:
            if is_on_loopback(host, int(port)):
                network = on_loopback()
        except OSError as error:
            raise MegatrainError(f"{problem}: {error.strerror or error}; {advice}") from None
    with network:
        _init(problem, advice, log_to_driver=True, logging_level=logging.WARNING)


@functools.cache
def _token() -> str:
    """Return the authentication token of this process's clusters, which Ray reads once and keeps.

    With a token of our own Ray writes none into the home directory.
    """
    return secrets.token_hex(32)


@contextmanager
def _embedded(num_cpus: int, num_gpus: int) -> Iterator[Daemons]:
    _check_threads(num_cpus)
    remove_left_sessions()
    path = SESSIONS / f"{SESSION_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        session = OwnedFolder.make(path, FolderKind.SESSION)
    except OSError as error:
        raise MegatrainError(
            f"cannot make {path}: {error.strerror}; Ray needs room in /tmp, where this user can write"
        ) from None
    # Ray opens its folder to every user, and a user could put links there that Ray then writes through. So Ray's folder
    # is inside one that only this user can enter.
    folder = session.path / "ray"
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    daemons, roots = Daemons(), None
    try:
        with _environment(EMBEDDED_ENVIRONMENT | {"RAY_AUTH_TOKEN": _token()}), on_loopback(), without_helpers():
            logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns that authentication is on
            _init(
                f"Ray did not start in {folder}", "/tmp and /dev/shm must be writable and have room", address="local",
                num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=True, logging_level=logging.ERROR, _temp_dir=str(folder),
            )  # fmt: skip
            roots = started_since(before)
            daemons = Daemons.among(roots)
            yield daemons
    finally:
        # Not all new children of this process: one may be a tracker's, which outlives the cluster.
        started = started_since(before) if roots is None else with_children(roots)
        if not (ray.is_initialized() and daemons.alive):  # else ray.shutdown would wait for those that live
            end_processes(started, 0)
        with _killing_late(lambda: started, END_TIMEOUT_S), ended_by(lambda: end_processes(with_children(started), 0)):
            ray.shutdown()
        end_processes(started, END_TIMEOUT_S)
        session.remove()
        remove_left_sessions()


def _check_threads(num_cpus: int) -> None:
    needed, free = RAY_THREADS + PROCESS_THREADS * num_cpus, free_threads()
    if free is not None and free < needed:
        raise CapacityError(
            f"a start needs at least {needed} threads, and {max(free, 0)} more may be started here; raise the limit of "
            "the user (ulimit -u) or of the container (--pids-limit), or end other processes"
        )


def remove_left_sessions() -> None:
    """Delete the session folders of this user's drivers that were killed, once Ray's processes of them have ended too.

    Looks only at folders with the mark of a session (files/owned_folder.py), whatever their names.
    """
    for path in session_folders():
        if why_not_owned(path, FolderKind.SESSION) is None and not _is_used(path):
            with suppress(NotOwnedError, OSError):
                remove_owned(path, FolderKind.SESSION)


def session_folders() -> list[Path]:
    """Return the paths that are named like a session folder. Only the mark says whether one is."""
    return sorted(SESSIONS.glob(f"{SESSION_PREFIX}*"))


def _is_used(folder: Path) -> bool:
    """Return whether a process of this user was started with the folder or has a file in it open.

    Ray's processes of a killed driver do, and would create the folder again: its agents live on for up to 70 s.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(str(folder) in argument for argument in process.cmdline()):
                return True
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    if file.readlink().is_relative_to(folder):
                        return True
    return False


def _init(problem: str, advice: str, **options: Any) -> None:
    """Call ray.init, and defer SIGTERM, SIGHUP and a first Ctrl-C until it has returned.

    The processes that Ray starts inherit blocked signals (Ray itself blocks SIGINT). Schedulers and terminals send them
    to the whole process group, and the run needs its processes for its last save. Raises MegatrainError if Ray fails.
    """
    handler, before = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        with _interrupted_afterwards(), _killing_late(lambda: started_since(others), DEADLINE_S):
            ray.init(job_config=DriverPaths(), **options)
    except Exception as error:  # Ray raises many classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MegatrainError(f"{problem}: {reason}; {advice}") from error
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray's own prints a stack and aborts
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _killing_late(find: Callable[[], list[psutil.Process]], timeout_s: float) -> Iterator[None]:
    """Kill the processes that `find` returns if the block takes longer than `timeout_s` seconds.

    This bounds calls of Ray that have no timeout. What waits for those processes then fails. Or Ray ends this process
    with exit code 1, once it has missed its head for as long as EMBEDDED_ENVIRONMENT says.
    """
    timer = threading.Timer(timeout_s, lambda: end_processes(find(), 0))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Deliver the first SIGINT of the block at its end. A second one is handled at once.

    Ray creates its core in one long call. If that call is interrupted, nobody holds the core to end it, and the process
    dies of signal 11 as it exits.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[int] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        if came:
            handler(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for what the block starts. Values that the user has set win."""
    before = {name: os.environ.get(name) for name in (*values, "RAY_AUTH_MODE")}  # the last is set by Ray
    os.environ.update({name: value for name, value in values.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
