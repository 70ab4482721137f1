"""A function over items in several processes: order, errors, processes that die, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.process_identity import start_ticks
from megatrain_ray.io.records import process_map
from megatrain_ray.io.records.process_map import ALONE_BYTES, BATCH_BYTES, BATCHES_EACH, map_in_order

FEW = ALONE_BYTES // 1000  # items of 1000 bytes: for this process
MANY = FEW + 20 * (BATCH_BYTES // 1000)  # and many batches for others


def described(item: bytes) -> tuple[int, bytes]:
    """Return the pid of the process that works on the item, and the item reversed."""
    return os.getpid(), item[::-1]


def failing(item: bytes) -> int:
    if item.startswith(b"%d " % (MANY - 5)):
        raise ConfigError("the item is bad")
    return len(item)


def killing(item: bytes) -> int:
    if item.startswith(b"%d " % (MANY - 5)):
        os.kill(os.getpid(), signal.SIGKILL)
    return len(item)


def sleeping(item: bytes) -> int:
    if item.startswith(b"%d " % (MANY - 5)):
        time.sleep(600)
    return len(item)


def printing(item: bytes) -> bytes:
    print("what a library prints")
    return item


def items(number: int = MANY) -> Iterator[tuple[int, bytes]]:
    return ((index, b"%d ".ljust(1000, b"x") % index) for index in range(number))


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_results_in_the_order_of_the_items(num_processes: int) -> None:
    results = list(map_in_order(described, items(), num_processes))
    assert [key for key, _ in results] == list(range(MANY))
    assert [result for _, (_, result) in results] == [item[::-1] for _, item in items()]
    pids = [pid for _, (pid, _) in results]
    others = set(pids) - {os.getpid()}
    assert len(others) == 0 if num_processes == 1 else 1 <= len(others) <= num_processes
    assert pids.count(os.getpid()) == (MANY if num_processes == 1 else pytest.approx(FEW, rel=0.1))


def test_few_items_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_map, "loky", None)
    assert [key for key, _ in map_in_order(described, items(FEW // 2), 8)] == list(range(FEW // 2))
    assert list(map_in_order(described, items(0), 8)) == []


def test_no_more_is_read_than_is_under_way() -> None:
    read = 0

    def counted() -> Iterator[tuple[int, bytes]]:
        nonlocal read
        for pair in items():
            read += 1
            yield pair

    most = 0
    with closing(map_in_order(described, counted(), 2)) as results:
        for number, _ in enumerate(results, 1):
            most = max(most, read - number)
    assert most <= (2 * BATCHES_EACH + 1) * (BATCH_BYTES // 1000 + 1)


def test_an_error_is_raised_where_its_item_stands() -> None:
    seen = []
    with (
        pytest.raises(ConfigError, match="the item is bad") as caught,
        closing(map_in_order(failing, items(), 2)) as results,
    ):
        for key, _ in results:
            seen.append(key)
    assert seen == list(range(len(seen)))
    assert len(seen) >= FEW // 2
    assert "in failing" in str(caught.value.__cause__)


def test_a_process_that_dies_ends_it() -> None:
    with pytest.raises(MegatrainError, match="a process that prepares data crashed or was killed"):
        list(map_in_order(killing, items(), 2))


def test_a_process_that_does_not_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_map, "ANSWER_S", 3.0)
    start_s = time.monotonic()
    with pytest.raises(MegatrainError, match="a process that prepares data did not answer within 3 s"):
        list(map_in_order(sleeping, items(), 2))
    assert time.monotonic() - start_s < 60


def test_what_is_left_early_leaves_no_process() -> None:
    with closing(map_in_order(described, items(), 2)) as results:
        pids = {pid for _, (pid, _) in (next(results) for _ in range(MANY - 100))} - {os.getpid()}
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_what_is_printed_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert [result for _, result in map_in_order(printing, items(), 2)] == [item for _, item in items()]
    assert "what a library prints" in capfd.readouterr().err


def test_a_program_without_a_guard_may_use_it(tmp_path: Path) -> None:
    """multiprocessing would run the program again in each of its children."""
    (tmp_path / "program.py").write_text(
        "from tests.io.records.test_process_map import MANY, described, items\n"
        "from megatrain_ray.io.records.process_map import map_in_order\n"
        "print('begun')\n"
        "assert len(list(map_in_order(described, items(), 2))) == MANY\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


def test_a_program_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, signal\n"
        "from tests.io.records.test_process_map import MANY, described, items\n"
        "from megatrain_ray.io.records.process_map import map_in_order\n"
        "results = map_in_order(described, items(), 2)\n"
        "print(*{pid for _, (pid, _) in (next(results) for _ in range(MANY - 100))} - {os.getpid()}, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    program, path = [sys.executable, str(tmp_path / "program.py")], os.pathsep.join(sys.path)
    done = subprocess.run(program, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    pids = done.stdout.split()
    assert pids
    end_s = time.monotonic() + 10
    while left := [pid for pid in pids if start_ticks(int(pid)) is not None]:
        assert time.monotonic() < end_s, left
        time.sleep(0.05)
