"""No full disk, closed pipe or missing folder behind what is said ends anything."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatrain_ray.console.logs import log_to, say
from megatrain_ray.errors import InterruptedRunError, MegatrainError
from tests.support.runs import ROOT

log = logging.getLogger("megatrain_ray.test")


def test_what_ends_the_block_is_logged_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(MegatrainError), log_to(tmp_path / "driver.log"):
        say("a step")
        raise MegatrainError("the reason")
    text = (tmp_path / "driver.log").read_text()
    assert "INFO megatrain_ray.console.logs: a step" in text
    assert "ERROR megatrain_ray.console.logs: ended by MegatrainError\nTraceback" in text
    assert "the reason" in text


def test_an_interrupt_is_no_error(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError), log_to(tmp_path / "driver.log"):
        raise InterruptedRunError("interrupted after step 3, saved at step 3")
    assert (
        (tmp_path / "driver.log")
        .read_text()
        .endswith("INFO megatrain_ray.console.logs: interrupted after step 3, saved at step 3\n")
    )


def test_what_ends_a_librarys_thread_is_logged_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError("No space left on device")

    before = threading.excepthook
    with log_to(tmp_path / "driver.log"):
        thread = threading.Thread(target=fail, name="events")
        thread.start()
        thread.join()
    assert threading.excepthook is before
    assert (
        "ERROR megatrain_ray.console.logs: events ended by OSError\nTraceback" in (tmp_path / "driver.log").read_text()
    )
    assert capsys.readouterr().err == ""


def test_a_full_disk_behind_the_log_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MegatrainError, match="the reason"), log_to(Path("/dev/full")):
        for _ in range(1000):
            log.info("something")
        raise MegatrainError("the reason")
    assert capsys.readouterr().err == ""


def test_the_log_begins_once_its_folder_is_there(tmp_path: Path) -> None:
    with log_to(tmp_path / "logs" / "driver.log"):
        log.info("too early")
        (tmp_path / "logs").mkdir()
        log.info("in time")
    assert (tmp_path / "logs" / "driver.log").read_text().count("\n") == 1


LINES = """
import sys
from megatrain_ray.console.logs import say, show
sys.stdin.read()
for step in range(1000):
    show(f"step {step}")
    say(f"said {step}")
print("the end", file=sys.stdout)
"""


@pytest.mark.parametrize("full", [False, True])
def test_who_no_longer_reads_ends_nothing(full: bool) -> None:
    """A closed pipe, or a full disk, behind both streams; with its usual code in the end."""
    read, write = os.pipe()
    target = os.open("/dev/full", os.O_WRONLY) if full else write
    process = subprocess.Popen(
        [sys.executable, "-c", LINES], cwd=ROOT, stdin=subprocess.PIPE, stdout=target, stderr=target
    )
    for descriptor in {read, write, target}:
        os.close(descriptor)
    process.communicate()
    assert process.returncode == 0


def test_control_characters_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages quote keys of records and names of the hub."""
    say("keys\tof\na record: a\x1b[2Jb\x9b1m é")
    assert capsys.readouterr().err == "keys\tof\\na record: a\\x1b[2Jb\\u009b1m é\n"
