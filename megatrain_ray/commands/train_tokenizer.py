"""Implements `megatrain tokenizer train`: trains a tokenizer on the user's own corpus."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from megatrain_ray.console.logs import drawing_on
from megatrain_ray.data.hub_sources import local_paths
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.partial_folder import complete_or_absent
from megatrain_ray.io.records.find_files import find_files
from megatrain_ray.io.tokens.train_bpe import read_corpus, special_tokens, train_bpe, write_tokenizer

# Names of settings in error messages of the readers, and the names of this command's options for them.
OPTIONS = {
    "data.path: ": "",
    "(data.text_field)": "(--field)",
    "set data.bad_records: skip": "give --bad-records skip",
}


def train_tokenizer(
    paths: Sequence[str], out_dir: Path, *, vocab_size: int, text_field: str, specials: Sequence[str],
    bad_records: Literal["error", "skip"],
) -> int:  # fmt: skip
    """Train a tokenizer and write it to a folder that `data.tokenizer` can name.

    The folder appears complete or not at all.

    paths: what data.path may be.

    Return the size of the vocabulary: less than `vocab_size` if the corpus has too few pairs to merge. Raises
    ConfigError if files or options are invalid or `out_dir` is in use, and MegatrainError if the disk fails.
    """
    tokens = special_tokens(specials)
    try:
        files = find_files(local_paths(paths))
        with complete_or_absent(out_dir) as folder, _bar() as bar:
            total_bytes = sum(file.stat().st_size for file in files)
            reading = bar.add_task("reading", total=total_bytes)
            texts = read_corpus(
                files, text_field, bad_records, lambda read_bytes: bar.update(reading, completed=read_bytes)
            )
            tokenizer = train_bpe(_and_then_merging(texts, bar), vocab_size, tokens)
            write_tokenizer(tokenizer, tokens, folder)
            return int(tokenizer.get_vocab_size())
    except ConfigError as error:
        message = str(error)
        for setting, option in OPTIONS.items():
            message = message.replace(setting, option)
        raise ConfigError(message) from None


def _and_then_merging(texts: Iterator[str], bar: Progress) -> Iterator[str]:
    """Yield the texts, then show a second task: the library then learns merges and does not report its progress."""
    yield from texts
    bar.add_task("merging", total=None)


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = drawing_on(sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
