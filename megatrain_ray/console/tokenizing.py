"""Reports how texts and chats of a source are turned into tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megatrain_ray.console.logs import drawing_on, say
from megatrain_ray.io.tokens.image_files import named_files_are_same
from megatrain_ray.io.tokens.token_files import TokenMeta
from megatrain_ray.units import format_count


class TokenizingReports:
    """Reports the progress of tokenising: a bar on a terminal while files are read, and lines at the end."""

    def __init__(self, name: str, bar: Progress, reports: bool) -> None:
        self._name = name
        self._reports = reports
        self._bar = bar
        self._task = bar.add_task("tokenizing", start=False)

    def wait(self, folder: Path) -> None:
        say(f"waiting for another process that makes the tokens of {self._name} in {folder}")

    def replace(self, folder: Path) -> None:
        if named_files_are_same(folder):
            say(f"the tokens of {self._name} in {folder} are damaged: they are made again")
        else:
            say(f"an image in {self._name} has changed: the tokens are made again in {folder}")

    def advance(self, read_bytes: int, total_bytes: int) -> None:
        self._bar.start_task(self._task)
        self._bar.update(self._task, completed=read_bytes, total=total_bytes)

    def end(self, meta: TokenMeta, seconds: float) -> None:
        if not self._reports:
            return
        rate = format_count(meta.num_tokens / max(seconds, 1e-3))
        say(
            f"tokenized {self._name}: {meta.num_documents} {'sequences' if meta.report else 'documents'}, "
            f"{meta.num_tokens} tokens in {seconds:.1f} s, {rate} tokens/s"
        )
        if meta.report:
            say(*meta.report)
            return
        if meta.num_empty:
            say(f"skipped {meta.num_empty} empty texts of {self._name}")
        if meta.num_bad:
            more = [f"and {meta.num_bad - len(meta.places)} more"] if meta.num_bad > len(meta.places) else []
            places = (f"  {place}" for place in (*meta.places, *more))
            say(f"skipped {meta.num_bad} records of {self._name} that hold no text:", *places)


@contextmanager
def reporting(name: str, reports: bool) -> Iterator[TokenizingReports]:
    """Yield what reports the progress of tokenising a source. `reports`: print what became of its records."""
    columns = (TextColumn("tokenizing"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = drawing_on(sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield TokenizingReports(name, bar, reports)
