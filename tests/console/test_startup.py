"""What is told before the first step: lines with times in a log, a line that goes again on a terminal."""

from __future__ import annotations

import io
import logging
import os
import re
import sys

import pytest

from megatrain_ray.console.logs import show
from megatrain_ray.console.startup import Startup, spinner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_a_phase_with_the_seconds_since_the_start(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    startup = Startup()
    with spinner("importing"), startup.phase("starting Ray"):
        print("from inside", file=sys.stderr)
    startup.tell("step 1 of 3")
    out, err = capsys.readouterr()
    assert out == ""
    first, inside, last = err.splitlines()
    assert re.fullmatch(r" {3}\d\.\d s  starting Ray", first)
    assert inside == "from inside"
    assert re.fullmatch(r" {3}\d\.\d s  step 1 of 3", last)
    assert caplog.messages == ["starting Ray", "step 1 of 3"]


def test_a_terminal_gets_a_line_that_goes_again_and_what_is_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    startup = Startup()
    with pytest.raises(KeyboardInterrupt), startup.phase("loading [weights]"):
        print("resuming", file=sys.stderr)
        raise KeyboardInterrupt
    startup.tell("step 1 of 3")
    assert sys.stderr is terminal
    shown = terminal.getvalue()
    assert "loading [weights]" in shown
    assert "resuming\n" in shown
    assert "step 1" not in shown
    erased_and_cursor_back = shown.rindex("\x1b[?25h"), shown.rindex("\x1b[2K")
    assert min(erased_and_cursor_back) > shown.rindex("loading")


def test_a_terminal_that_closes_meanwhile_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a connection that breaks: each write fails from then on, also those of the spinner's own thread."""
    near, far = os.openpty()
    with open(far, "w") as terminal:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", terminal)
        with spinner("loading"):
            os.close(near)
            show("said", stream=sys.stderr)
        show("said afterwards", stream=sys.stderr)
