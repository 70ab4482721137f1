"""Input that does not end, or is no file, is refused in time, whichever command reads it."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

from megatrain_ray.cli import main
from megatrain_ray.config.yaml_file import read_settings
from megatrain_ray.engine.model import parameter_rules
from megatrain_ray.engine.model.lora import Lora
from megatrain_ray.engine.model.parameter_rules import ParameterRules
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat import chat_template
from megatrain_ray.io.chat.chat_template import PLAIN, ChatTemplate, read_named_template
from megatrain_ray.io.chat.conversation_formats import MESSAGES, read_conversation
from megatrain_ray.io.chat.mark_turns import TurnMarker
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.read_file import parse_json, regular_file
from megatrain_ray.time_limit import OutOfTimeError, time_limit
from tests.support.report_runs import make_run
from tests.support.runs import config, write_config
from tests.support.tiny import build_tiny

ENDLESS = "^(([a-z_.0-9])+)+$x"  # takes twice as long with each letter of a name
BOMB = "\n".join(["a0: &a0 [x]", *(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 9))])


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


KINDS = (pipe, device, bound_socket, Path.mkdir)


@pytest.mark.parametrize("make", KINDS)
def test_only_regular_files_are_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"expected a regular file|Is a directory"):
        regular_file(tmp_path / "file")
    (tmp_path / "other").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert regular_file(tmp_path / "link").read_text() == "x"
    with pytest.raises(OSError, match="NUL"):
        regular_file(Path("a\0b"))


# file of a model folder, of data or of a run → the command that reads it, and its exit code with a pipe there
READERS: dict[str, tuple[str, int]] = {
    "config.yaml": ("plan", 2), "model/config.json": ("plan", 2), "model/generation_config.json": ("plan", 2),
    "text.txt": ("data", 2), "run/config.yaml": ("inspect", 2), "run/plan.json": ("inspect", 0),
    "run/metrics.jsonl": ("inspect", 1), "run/history.jsonl": ("inspect", 0), "run/model.json": ("inspect", 0),
    "run/lock": ("inspect", 0), "run/processes.json": ("inspect", 0), "tokenizer.json": ("data", 2),
}  # fmt: skip


def test_no_command_waits_for_a_pipe(tmp_path: Path) -> None:
    for number, (name, (command, code)) in enumerate(READERS.items()):
        folder = tmp_path / str(number)
        tree = config(folder / "new", build_tiny(folder / "model"), data__path=str(folder / "text.txt"))
        if name == "tokenizer.json":
            tree["data"]["tokenizer"] = str(folder)
        (folder / "text.txt").write_text("a text of some letters, and a second one to follow it")
        write_config(folder / "config.yaml", tree)
        if command == "inspect":
            make_run(folder / "run", 2)
        (folder / name).unlink(missing_ok=True)
        pipe(folder / name)
        with time_limit(30):
            assert main([command, str(folder / ("run" if command == "inspect" else "config.yaml"))]) == code, name
        shutil.rmtree(folder)


def test_a_time_limit_ends_loops_and_regular_expressions() -> None:
    before = signal.getsignal(signal.SIGALRM)
    for work in (lambda: re.search(ENDLESS, "a" * 60), lambda: [None for _ in iter(int, 1)]):
        with pytest.raises(OutOfTimeError), time_limit(0.02):
            work()
    with pytest.raises(OutOfTimeError), time_limit(0.05):
        with time_limit(10):  # does not put the outer one off
            pass
        while True:
            time.sleep(1)
    with time_limit(10):
        pass
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_time_limit_is_over_if_its_signal_comes_at_the_last_moment() -> None:
    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is time_limit.__wrapped__.__code__ and event == "line" and frame.f_lineno in last_lines:
            last_lines.clear()
            signal.raise_signal(signal.SIGALRM)
        return trace

    lines, first = inspect.getsourcelines(time_limit.__wrapped__)
    last_lines = [first + i for i, line in enumerate(lines) if "is_over = True" in line][:1]
    before, traced = signal.getsignal(signal.SIGALRM), sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(OutOfTimeError), time_limit(10):
            pass
    finally:
        sys.settrace(traced)
    assert not last_lines
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0  # the interval at which a limit raises again
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_pattern_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_rules, "PATTERN_S", 0.05)
    model = nn.ModuleDict({"a" * 40: nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=re.escape(f"train.freeze: {ENDLESS!r} was not compared")):
        ParameterRules(freeze=(ENDLESS,)).assign(model)
    with pytest.raises(ConfigError, match=r"lora\.match: .* was not compared"):
        Lora((ENDLESS,), 2, 1.0, 0.0).attach(model)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "aliases"),
        ("x: &x [*x]", "aliases"),
        ("a0: &a0 {b: 1}\n" + BOMB.partition("\n")[2].replace("[", "{<<: [").replace("]", "]}"), "aliases"),
        ("a: " + "[" * 700 + "]" * 700, "nested too deeply"),
    ],
)
def test_settings_of_endless_size_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # torch's compiler raises it
    try:
        with pytest.raises(ConfigError, match=problem):
            read_settings(tmp_path / "config.yaml")
    finally:
        sys.setrecursionlimit(limit)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_a_template_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.1)
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"data\.chat_template: loops did not render a conversation of 1 turns"):
        ChatTemplate("loops", loop + "{% endfor %}").render([{"role": "user", "content": "x"}])


def test_a_conversation_of_too_many_turns_is_refused() -> None:
    """The template writes the last answer otherwise, so that each has a text of its own."""
    last = "else '<|im_end|>' if loop.last or message.role == 'user' else '<|end|>'"
    source = read_named_template(PLAIN).replace("else '<|im_end|>'", last)
    marker = TurnMarker(ChatTemplate("plain", source))
    turns = [{"role": role, "content": "x"} for _ in range(4000) for role in ("user", "assistant")]
    with pytest.raises(RecordError, match="8000 turns are too many for one conversation"):
        marker.mark(read_conversation({"messages": turns}, MESSAGES))
