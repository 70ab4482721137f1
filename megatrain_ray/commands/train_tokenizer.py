"""`megatrain tokenizer train`: a tokenizer from one's own corpus."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.partial_folder import complete_or_absent
from megatrain_ray.io.records.find_files import find_documents
from megatrain_ray.io.tokens.train_bpe import read_corpus, special_tokens, train_bpe, write_tokenizer

# What readers say of the settings of a run, in the words of this command.
OPTIONS = {
    "data.path: ": "",
    "(data.text_field)": "(--field)",
    "set data.bad_records: skip": "give --bad-records skip",
}


def train_tokenizer(
    paths: Sequence[str],
    out_dir: Path,
    *,
    vocab_size: int,
    text_field: str,
    specials: Sequence[str],
    bad_records: Literal["error", "skip"],
) -> int:
    """Writes a folder that data.tokenizer can name; it appears whole or not at all. `paths`: as data.path.

    Returns how many ids there are: fewer than `vocab_size` where the corpus has no more pairs. Raises ConfigError for
    what is wrong with files or options and for an `out_dir` that is in use, MegatrainError where the disk fails.
    """
    tokens = special_tokens(specials)
    try:
        files = find_documents(paths)
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
    """When the texts are over the library learns merges, and does not say how far it is."""
    yield from texts
    bar.add_task("merging", total=None)


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
