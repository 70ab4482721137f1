"""Imports beside something that waits."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from megatrain_ray.workers.early_imports import COMPILER, TRANSFORMERS, import_all, importing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for modules of the test, which are forgotten after it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_they_are_there_after_the_block(folder: Path) -> None:
    (folder / "early_a.py").write_text("import signal\nblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n")
    (folder / "early_bad.py").write_text("raise ValueError\n")
    (folder / "early_b.py").touch()
    with importing(("early_a", "early_bad", "early_none", "early_b")):
        pass
    assert signal.SIGTERM in sys.modules["early_a"].blocked, "the main thread decides when it hears one"
    assert "early_b" in sys.modules, "whoever needs what cannot be imported says so"
    assert "early_bad" not in sys.modules


def test_one_that_is_stopped_imports_no_further(folder: Path) -> None:
    stopped = threading.Event()
    (folder / "early_gate.py").touch()
    sys.modules["early_gate"] = __import__("early_gate")
    sys.modules["early_gate"].stopped = stopped  # type: ignore[attr-defined]
    (folder / "early_a.py").write_text("import early_gate\nearly_gate.stopped.set()\n")
    (folder / "early_b.py").touch()
    import_all(("early_a", "early_b"), stopped)
    assert "early_a" in sys.modules
    assert "early_b" not in sys.modules


def test_a_block_that_fails_ends_the_imports(folder: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), importing(("json",)):
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("module", [*TRANSFORMERS, *COMPILER])
def test_what_is_imported_early_exists(module: str) -> None:
    """Nobody would notice: an import that fails here is made again where it is needed."""
    __import__(module)
