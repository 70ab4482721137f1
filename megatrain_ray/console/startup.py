"""Reports what a run does before its first step: on a terminal a line that disappears, elsewhere one a phase."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatrain_ray.console.logs import drawing_on, show

log = logging.getLogger(__name__)


class Startup:
    """Reports the phases of a start. Lines carry the seconds since this object was created."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Report what the block does, and show a spinner while it runs."""
        self.tell(doing)
        with spinner(doing):
            yield

    def tell(self, doing: str) -> None:
        """Write what is being done to the log, and to standard error."""
        log.info(doing)
        if not _on_terminal():  # there something else shows it
            show(f"{time.monotonic() - self._start_s:6.1f} s  {doing}", stream=sys.stderr)


@contextmanager
def spinner(doing: str) -> Iterator[None]:
    """Show a line with the elapsed seconds while the block runs, if standard error is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = drawing_on(sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not _on_terminal()) as line:
        line.add_task(doing, total=None)
        yield


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
