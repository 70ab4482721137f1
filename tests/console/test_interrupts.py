"""Ctrl-C, SIGTERM and SIGHUP, by real signals to this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_ray.console.interrupts import ENDINGS, SIGNALS, Interrupts
from megatrain_ray.crew.ray_cluster import _init

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Let SIGHUP be as it is in a terminal, also where nohup runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def wait() -> None:
    """Wait for a signal, in Python code."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pass


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def test_what_saves_nothing_does_not_say_that_it_saves(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts(saves=False) as interrupts, interrupts.put_off():
        send(signal.SIGINT)
    assert capfd.readouterr().err == "interrupted: stopping (once more: stop at once)\n"


def test_on_a_terminal_it_replaces_the_bar_that_is_drawn_there() -> None:
    before, (terminal, drawn) = os.dup(2), os.openpty()
    os.dup2(drawn, 2)
    try:
        with Interrupts() as interrupts, interrupts.put_off():
            os.write(2, b"step 3/9")
            send(signal.SIGINT)
    finally:
        os.dup2(before, 2)
    shown = b""
    while not shown.endswith(b"\n"):  # it comes in pieces
        shown += os.read(terminal, 999)
    assert shown.startswith(b"step 3/9\r\x1b[2Kinterrupted: saving, then stopping")
    for number in (before, terminal, drawn):
        os.close(number)


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_asks_and_the_second_ends(
    first: signal.Signals, second: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.put_off():
        assert not interrupts.requested
        send(first)
        assert interrupts.requested
        assert capfd.readouterr().err.count("interrupted: saving, then stopping") == 1
        send(second)
    assert handlers() == before


@pytest.mark.parametrize("number", SIGNALS)
def test_where_nothing_can_be_saved_the_first_ends(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        with interrupts.put_off():
            pass
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert not interrupts.requested


@pytest.mark.parametrize("number", SIGNALS)
def test_one_in_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    class Finalized:
        def __del__(self) -> None:
            send(number)
            ended.append(True)

    ended: list[bool] = []
    with pytest.raises(KeyboardInterrupt), Interrupts():
        Finalized()
        wait()
    assert ended


class Interrupted(TorchDispatchMode):
    """Sends a signal in each call that torch's C++ code makes."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        send(signal.SIGINT)
        self.ended = True
        return func(*args, **kwargs or {})


def test_one_in_code_that_torch_calls_comes_after_it() -> None:
    """Torch's C++ code aborts at some exceptions of what it calls, and drops others."""
    mode = Interrupted()
    with pytest.raises(KeyboardInterrupt), Interrupts():
        with mode:
            torch.zeros(2)
        wait()
    assert mode.ended


def test_one_in_code_of_torch_comes_after_it() -> None:
    module = torch.nn.Identity()
    ended: list[bool] = []
    module.register_forward_hook(lambda *_: send(signal.SIGINT))
    module.register_forward_hook(lambda *_: ended.append(True))
    with pytest.raises(KeyboardInterrupt), Interrupts():
        module(torch.zeros(2))
        wait()
    assert ended


def test_one_that_a_library_makes_another_error_of_is_told_as_one() -> None:
    """As the import of a module of Transformers does."""
    with pytest.raises(KeyboardInterrupt), Interrupts():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise ModuleNotFoundError("Could not import module") from error


def test_what_is_cleaned_up_is_not_broken_off() -> None:
    cleaned = []
    with Interrupts():
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt:
            for number in SIGNALS:
                send(number)
                cleaned.append(number)
    assert cleaned == list(SIGNALS)


def test_nobody_needs_to_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", refuse)
    with Interrupts() as interrupts, interrupts.put_off():
        send(signal.SIGINT)
        assert interrupts.requested


def test_without_a_signal_nothing_changes() -> None:
    before = handlers()
    with Interrupts() as interrupts:
        assert handlers() != before
    assert not interrupts.requested
    assert handlers() == before


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts():
        send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_while_ray_starts_is_heard(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Ray takes SIGTERM for itself: its handler would print a stack and abort."""

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("Ray's handler"))
        signal.pthread_kill(threading.get_ident(), number)
        assert number in signal.sigpending()

    monkeypatch.setattr("ray.init", init)
    before = handlers()
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        _init("Ray did not start", "start it")
    assert handlers() == before
    assert not {*ENDINGS} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ray_makes_its_core_to_the_end() -> None:
    """A signal meanwhile is heard by Python as soon as that call is over, before anybody holds what it made."""
    program = """
import os, signal
import ray
from megatrain_ray.crew.ray_cluster import cluster
from megatrain_ray.console.interrupts import Interrupts

class Core(ray._raylet.CoreWorker):
    def __init__(self, *args):
        os.kill(os.getpid(), signal.SIGINT)

ray._raylet.CoreWorker = Core
try:
    with Interrupts(), cluster(1, 0):
        print("not heard")
except KeyboardInterrupt:
    print("heard")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


def test_a_second_signal_while_ray_starts_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    came = []

    def init(**options: object) -> None:
        send(signal.SIGINT)
        came.append(1)
        send(signal.SIGINT)
        came.append(2)

    monkeypatch.setattr("ray.init", init)
    before = handlers()
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        _init("Ray did not start", "start it")
    assert came == [1]
    assert handlers() == before


def test_outside_the_main_thread_it_leaves_handlers_alone() -> None:
    before, within = handlers(), []

    def work() -> None:
        with Interrupts():
            within.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert within == [before]
