"""What a run does before its first step, told as it is done: on a terminal a line that goes again, elsewhere a line
each."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatrain_ray.console.logs import show

log = logging.getLogger(__name__)


class Startup:
    """Begins with a start of a run; what is said afterwards has the seconds since."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Tells what the block does."""
        self.tell(doing)
        with spinner(doing):
            yield

    def tell(self, doing: str) -> None:
        """Tells log and standard error, but no terminal: something else shows it there."""
        log.info(doing)
        if not _on_terminal():
            show(f"{time.monotonic() - self._start_s:6.1f} s  {doing}", sys.stderr)


@contextmanager
def spinner(doing: str) -> Iterator[None]:
    """A line with the seconds that the block takes, on the terminal that standard error is; nothing elsewhere."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not _on_terminal()) as line:
        line.add_task(doing, total=None)
        yield


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
