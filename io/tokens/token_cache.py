"""Tokenises documents once, into one folder of ids and document lengths per data source.

A folder is found again by a hash of everything that decides its tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.atomic_file import STALL_S, wait_for_lock
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.io.files.owned_folder import FolderKind, NotOwnedError, is_free, remove_owned
from megatrain_ray.io.files.partial_folder import complete_or_absent, partial_of, remove_abandoned
from megatrain_ray.io.records.choose_records import ALL_RECORDS, RecordChoice, RecordChooser
from megatrain_ray.io.records.read_records import BadRecords, RecordOutcome, RecordTally
from megatrain_ray.io.records.read_texts import TextBlock, read_texts
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.cache_pruning import is_held
from megatrain_ray.io.tokens.token_files import (
    META_NAME,
    VERSION,
    TokenBlock,
    TokenMeta,
    TokenWriter,
    id_bytes,
    is_whole,
)
from megatrain_ray.io.tokens.tokenizer import Tokenizer, load_tokenizer, tokenizer_files


class FolderWatcher(Protocol):
    """Receives reports when a folder of the cache cannot be made at once."""

    def wait(self, folder: Path) -> None:
        """Report that this process waits for another one that makes this folder."""

    def replace(self, folder: Path) -> None:
        """Report that the folder is damaged and will be made again."""


class Watcher(FolderWatcher, Protocol):
    """Receives progress reports while tokens are made."""

    def advance(self, read_bytes: int, total_bytes: int) -> None:
        """Report how many bytes of the input files have been read and their tokens written."""

    def end(self, meta: TokenMeta, seconds: float) -> None:
        """Report that the folder is complete, after `seconds`."""


class Recipe(Protocol):
    """Makes the tokens of one data source from its files."""

    @property
    def files(self) -> Sequence[Path]: ...

    @property
    def tokenizer(self) -> str | None:
        """Return the tokenizer's name; None: the records hold ids."""

    @property
    def bad_records(self) -> BadRecords: ...

    @property
    def has_weights(self) -> bool:
        """Return whether the blocks have loss weights. Each of them is then a whole sequence."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of further numbers that the blocks have for each token."""

    def settings(self) -> dict[str, Any]:
        """Return what decides the tokens in addition to the files and the tokenizer, as data for JSON."""

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        """Yield the tokens of the files in their order, and count the records. Raises ConfigError."""


@dataclass(frozen=True)
class TextRecipe:
    """Makes tokens from texts: the files in their order, the tokenizer, and how records are read."""

    files: tuple[Path, ...]
    tokenizer: str
    text_field: str
    bad_records: BadRecords
    choice: RecordChoice = ALL_RECORDS
    add_bos: bool = False  # whether each text begins with the tokenizer's bos token
    add_eos: bool = False  # whether each text ends with the tokenizer's eos token
    has_weights: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ()

    def settings(self) -> dict[str, Any]:
        # What an earlier release would have made as well keeps the key that it had.
        added = {key: True for key in ("add_bos", "add_eos") if getattr(self, key)}
        fields = {"text_field": self.text_field, "bad_records": self.bad_records}
        return {**fields, **added, **load_tokenizer(self.tokenizer).extension, **self.choice.settings()}

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        assert tokenizer is not None
        blocks = tokenizer.encode_all(self._texts(tally))
        blocks = begun_with(tokenizer.bos, blocks) if self.add_bos else blocks
        return ended_with(tokenizer.end_of_document, blocks) if self.add_eos else blocks

    def _texts(self, tally: RecordTally) -> Iterator[TextBlock]:
        chooser = RecordChooser(self.choice)
        for file in self.files:
            yield from read_texts(file, self.text_field, tally, chooser)
        chooser.check()


def begun_with(bos: int | None, blocks: Generator[TokenBlock]) -> Generator[TokenBlock]:
    """Yield the blocks of documents, with the bos token before each document. Raises ConfigError if there is none."""
    if bos is None:
        raise ConfigError(
            "data.add_bos: the tokenizer names no bos_token that its tokenizer.json has; set data.add_bos: false"
        )
    begins = True
    with closing(blocks):
        for block in blocks:
            ids = np.concatenate([np.array([bos], np.uint32), block.ids]) if begins else block.ids
            yield block._replace(ids=ids)
            begins = block.ends


def ended_with(eos: int | None, blocks: Generator[TokenBlock]) -> Generator[TokenBlock]:
    """Yield the blocks of documents, with the eos token after each document. Raises ConfigError if there is none."""
    if eos is None:
        raise ConfigError(
            "data.add_eos: the tokenizer names no eos_token that its tokenizer.json has; set data.add_eos: false"
        )
    with closing(blocks):
        for block in blocks:
            yield block._replace(ids=np.append(block.ids, np.uint32(eos))) if block.ends else block


def provenance_of(recipe: Recipe) -> dict[str, Any]:
    """Return everything that decides the tokens, as data for JSON. Raises ConfigError for an unreadable file."""
    try:
        parts = tokenizer_files(recipe.tokenizer) if recipe.tokenizer else ()
        hashes = [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in parts]
        return {
            "version": VERSION,
            "files": [file_identity(file) for file in recipe.files],
            "tokenizer": hashes or recipe.tokenizer,
            **recipe.settings(),
        }
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from None


def key_of(provenance: dict[str, Any]) -> str:
    """Return the name of the folder that holds the tokens of this provenance."""
    return hashlib.sha256(json.dumps(provenance).encode()).hexdigest()[:32]


def find_tokens(recipe: Recipe, root: Path) -> Path | None:
    """Return the undamaged folder of a recipe in `root`, or None if there is none. Raises as make_tokens."""
    folder = root / key_of(provenance_of(recipe))
    return folder if is_whole(folder) else None


def make_tokens(recipe: Recipe, root: Path, vocab_size: int, watcher: Watcher) -> Path:
    """Return the folder of a recipe in `root`, made if missing or damaged, by one process while others wait.

    Raises ConfigError for what is wrong with files, tokenizer or ids, MegatrainError if the disk fails.
    """
    provenance = provenance_of(recipe)
    folder = root / key_of(provenance)
    meta, start = None, time.monotonic()
    with locked_folder(folder, partial_of(folder), watcher):
        if not is_whole(folder):
            with new_folder(folder, watcher) as partial:
                start = time.monotonic()
                meta = write_tokens(recipe, partial, vocab_size, watcher.advance, provenance)
    if meta is not None:
        watcher.end(meta, time.monotonic() - start)
    return folder


def write_tokens(
    recipe: Recipe, folder: Path, vocab_size: int, advance: Callable[[int, int], None], provenance: dict[str, Any]
) -> TokenMeta:
    """Write the tokens of a recipe into an empty folder.

    advance: as for Watcher; what it raises ends this.

    Raises ConfigError as make_tokens, and OSError.
    """
    meta = _write(recipe, folder, vocab_size, advance)
    tree = {"provenance": provenance, "tokens": asdict(meta)}
    (folder / META_NAME).write_text(json.dumps(tree, indent=1), encoding="utf-8")
    if provenance_of(recipe) != provenance:
        raise ConfigError("data.path: files changed while they were read; start again when they are done")
    return meta


@contextmanager
def locked_folder(folder: Path, written: Path, watcher: FolderWatcher, stall_s: float = STALL_S) -> Iterator[None]:
    """Let no other process make this folder of the cache during the block. Raises MegatrainError if it has no lock.

    written: folder whose files change while a process makes it.
    stall_s: as for wait_for_lock.
    """
    lock = folder.with_name(f"{folder.name}.lock")

    def progress() -> object:
        return _progress(written)

    with ExitStack() as stack:
        with explained("write", folder):
            stack.enter_context(wait_for_lock(lock, lambda: watcher.wait(folder), progress, stall_s))
        yield


@contextmanager
def new_folder(folder: Path, watcher: FolderWatcher) -> Iterator[Path]:
    """Yield where to write a locked folder of the cache, as complete_or_absent does. A damaged one is replaced.

    Raises MegatrainError if a run reads the damaged one.
    """
    with explained("write", folder):
        if not is_free(folder):
            if is_held(folder):
                raise MegatrainError(
                    f"{folder} is damaged, or an image has changed of which it was made, and another run reads it: "
                    "start again when that has ended"
                )
            watcher.replace(folder)
            _remove_damaged(folder)
        remove_abandoned(folder.parent)
    with complete_or_absent(folder, FolderKind.TOKENS) as partial:
        yield partial


def _remove_damaged(folder: Path) -> None:
    try:
        remove_owned(folder, FolderKind.TOKENS)
    except NotOwnedError as error:
        raise NotOwnedError(f"{error}; its tokens are damaged: delete it, then start again") from None


def _progress(partial: Path) -> list[tuple[int, int]]:
    """Return what changes while another process writes a folder."""
    with suppress(OSError):
        stats = [file.stat() for file in sorted(partial.iterdir())]
        return [(found.st_size, found.st_mtime_ns) for found in stats]
    return []


def _write(recipe: Recipe, folder: Path, vocab_size: int, advance: Callable[[int, int], None]) -> TokenMeta:
    """Stream the files of a recipe to disk; only the blocks in flight are in memory. Raises ConfigError, OSError."""
    tokenizer = load_tokenizer(recipe.tokenizer) if recipe.tokenizer else None
    # Ids that records give, as rollouts may, are those of the model, which may have more than the tokenizer.
    itemsize = id_bytes(tokenizer.num_ids) if tokenizer and not recipe.columns else 4
    tally = RecordTally(recipe.bad_records)
    *starts, total_bytes = accumulate((file.stat().st_size for file in recipe.files), initial=0)
    start_of = dict(zip(recipe.files, starts, strict=True))

    def written(last: RecordLocation) -> None:
        advance(start_of[last.file] + last.read_bytes, total_bytes)

    with (
        TokenWriter(
            folder, itemsize, vocab_size, written, has_weights=recipe.has_weights, columns=recipe.columns
        ) as writer,
        closing(recipe.blocks(tokenizer, tally)) as blocks,
    ):
        for block in blocks:
            writer.add(block)
        if writer.images:
            writer.images.name(tally.unused_files)
        writer.finish()
    return TokenMeta(
        itemsize=itemsize,
        num_tokens=writer.num_tokens,
        num_documents=writer.num_documents,
        num_empty=tally.counts[RecordOutcome.EMPTY],
        num_bad=tally.counts[RecordOutcome.BAD],
        places=tally.locations(RecordOutcome.BAD),
        highest_id=writer.highest_id,
        highest_file=writer.highest_file,
        end_of_document=tokenizer.end_of_document if tokenizer else None,
        crc32=writer.crc32,
        num_supervised=tally.num_supervised if recipe.has_weights else None,
        report=tuple(tally.lines()) if recipe.has_weights else (),
        weighted=writer.weighted,
        num_records=tally.num_records if recipe.has_weights else writer.num_documents + tally.num_dropped,
        num_cut=tally.num_cut,
        longest=tally.longest,
        num_dropped=tally.num_dropped,
        columns=recipe.columns,
        num_images=writer.images.num_images if writer.images else 0,
        image_bytes=writer.images.num_bytes if writer.images else 0,
    )
