"""Sets up what all tests share: no network, quiet libraries, one Ray cluster for those that need one."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.sampling import numbered, pairwise, spread

if TYPE_CHECKING:
    from tests.support.in_process import Actors, Train
    from tests.support.object_server import Bucket, ObjectServer

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; nothing here may ask the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Read by OpenMP when torch is imported, here and in the processes of runs: threads that share cores wait without
# spinning. A run of ten steps took 0.55 CPU seconds so, 6.0 otherwise.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read by the compiler of torch: no vectors in kernels. To see which there are it would compile and run ten programs.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


# An example takes as long as a loaded machine takes, and the same ones are tried each time. `make test-all` tries more.
settings.register_profile("few", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("many", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("few")

WHOLE_RUNS = Path(__file__).with_name("runs")
IN_PROCESS, WITH_RAY = "in process", "with Ray"  # cases of each test that has the fixture `actors`

END_S = 30.0  # limit for threads and connections to end that have been told to
END_POLL_S = 0.02


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run everything that is long by nature, as make test-all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses the tests' cluster as `ray`, since it starts as many processes as there are cores.

    Leave out long tests. Put whole runs first, since a long file at the end would leave workers idle.
    """
    items.sort(key=lambda item: not item.path.is_relative_to(WHOLE_RUNS))
    for item in items:
        if uses_cluster(item):
            item.add_marker("ray")
    if not config.getoption("--all-cases"):
        left_out = {id(item) for item in left_for_all_cases(items)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture(scope="module", autouse=True)
def short_garbage_collections() -> None:
    """Exclude what is there before a module from garbage collections, each of which would visit a million objects."""
    gc.collect()
    gc.freeze()


def uses_cluster(item: pytest.Item) -> bool:
    """Return whether a test runs on the tests' cluster, to which this process is connected."""
    case = item.callspec.params if hasattr(item, "callspec") else {}
    return "ray_address" in getattr(item, "fixturenames", ()) or case.get("actors") == WITH_RAY


def left_for_all_cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what `make test` leaves out: tests marked `long`, and most cases of those marked `pairwise` or `spread`."""
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long"):
            yield item
        elif item.get_closest_marker("pairwise") or item.get_closest_marker("spread"):
            groups.setdefault(item.function, []).append(item)  # type: ignore[attr-defined]
    for group in groups.values():
        marker = group[0].get_closest_marker("spread")
        cases = [item.callspec.params if hasattr(item, "callspec") else {} for item in group]
        kept = spread(len(cases), marker.args[0]) if marker else pairwise(numbered(cases))
        yield from (item for k, item in enumerate(group) if k not in kept)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each run of the tests a cache of its own: tokens are made again, and the user's cache stays as it is."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def models_traced_once() -> Iterator[None]:
    """Share the trial forwards of models among all runs and plans in this process."""
    from megatrain_ray.model import discover_model
    from tests.support.shared_trials import discover_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover_model, "discover", discover_once)
        yield


@pytest.fixture(scope="session")
def started_objects() -> Iterator[ObjectServer]:
    from tests.support.object_server import object_server

    with object_server() as server:
        yield server


@pytest.fixture
def objects(started_objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a new bucket of an S3 server on this machine, which the environment names with its credentials."""
    from tests.support.object_server import new_bucket

    return new_bucket(started_objects, monkeypatch)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Yield the address of a cluster that this process started.

    A run given it as RAY_ADDRESS starts none of its own.
    """
    import ray

    from megatrain_ray.crew.ray_cluster import cluster

    with cluster(num_cpus=4, num_gpus=0):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module", params=[IN_PROCESS, pytest.param(WITH_RAY, marks=[pytest.mark.ray, pytest.mark.long])])
def actors(request: pytest.FixtureRequest) -> Actors:
    """Return a context in which runs have threads of this process for actors, or processes of the tests' cluster."""
    if request.param == WITH_RAY:
        request.getfixturevalue("ray_address")
        return nullcontext
    from tests.support.in_process import actors_as_threads

    return actors_as_threads


@pytest.fixture(scope="module")
def train(actors: Actors) -> Train:
    """Return a function that runs `megatrain train` with its arguments to the end, with these actors."""
    from tests.support.in_process import Train

    return Train(actors, has_processes=actors is nullcontext)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a thread of ours still runs, or more shared memory or sockets are open than before.

    Tests with Ray in this process are not checked: Ray keeps connections and threads as it likes.
    """
    if uses_cluster(request.node):
        yield
        return
    threads, files = running_threads(), open_files()
    yield
    if running_threads() <= threads and open_files() <= files:
        return
    # What a reference cycle still holds is not left behind, nor are threads of a pool that nobody holds any more, which
    # are about to end and may hold sockets. A collection after each test would be slow.
    deadline_s = time.monotonic() + END_S
    while not (running_threads() <= threads and open_files() <= files) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(END_POLL_S)
    left = [f"thread {thread.name}" for thread in running_threads() - threads]
    left += [f"{count} × {name}" for name, count in (open_files() - files).items()]
    if left:
        pytest.fail(f"left behind: {', '.join(left)}", pytrace=False)


def running_threads() -> set[threading.Thread]:
    """Return the threads that a test must end: all but daemons, which are those of libraries.

    Daemons of shards are included.
    """
    return {t for t in threading.enumerate() if t.is_alive() and (not t.daemon or t.name.startswith("shard "))}


def open_files() -> Counter[str]:
    """Count the descriptors of each shared memory, and of sockets."""
    names: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208  before and after each test: pathlib takes ten times as long
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith("/memfd:"):
            names[target] += 1
        elif target.startswith("socket:"):
            names["socket"] += 1
    return names
