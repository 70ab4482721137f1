"""Keeps the portions of a stream on disk: each a folder of tokens, all of them together within a number of bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_sources import cut_source
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.io.batching.corpus import Fingerprint
from megatrain_ray.io.batching.portion_stream import PortionFacts
from megatrain_ray.io.batching.windows import Windows
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import FolderKind, OwnedFolder, has_mark, is_free, remove_owned, why_not_owned
from megatrain_ray.io.files.partial_folder import remove_abandoned
from megatrain_ray.io.records.stream_files import StreamFile, listing_of
from megatrain_ray.io.tokens.token_files import META_NAME
from megatrain_ray.read_file import parse_json
from megatrain_ray.units import format_bytes

FACTS_NAME = "portions.jsonl"  # facts of every portion that was made
KEY_NAME = "key.json"  # what decides the tokens of portions
FETCHED_NAME = "fetched"  # folder of the files of the portion that is being made
ROOM = 1.1  # a portion may take so much more for each byte of its files than any before


@dataclass(frozen=True)
class StreamSpec:
    """Describes a stream.

    folder: of the run; the lock of the run directory guards it.
    limit: most bytes there.
    sources: name of each source, and the files of each of its portions.
    data: what decides the tokens, with marks decided.
    environment: of the driver: in a cluster that it joined, other processes may lack its credentials.
    """

    folder: Path
    limit: int
    sources: tuple[tuple[str, tuple[tuple[StreamFile, ...], ...]], ...]
    data: DataConfig
    tokenizer: str
    vocab_size: int
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class PortionId:
    """Names a portion: the number of its source, and its number in that."""

    source: int
    number: int


class StreamFolder:
    """Finds, counts and deletes the portions of a stream. One process at a time makes them (make_portion.py)."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self._facts: dict[PortionId, PortionFacts] = {}
        file = spec.folder / FACTS_NAME
        if file.exists():
            with explained("read", file):
                lines = file.read_text(errors="replace").splitlines()
            self._facts = dict(filter(None, map(_parsed, lines)))

    @staticmethod
    def open(spec: StreamSpec, key: Mapping[str, Any]) -> StreamFolder:
        """Make the folder, or find that of an earlier start. One with another key is deleted, and what a kill has left.

        key: what decides the tokens, as data for JSON. Raises ConfigError if something else is there.
        """
        folder, text = spec.folder, json.dumps(key)
        with explained("make", folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not is_free(folder) and not has_mark(folder, FolderKind.RUN_PART):
                raise ConfigError(f"run_dir: {folder} is there, and no stream made it: move it away")
            if not is_free(folder):
                # Else portions could not be deleted later, when their room is needed.
                if reason := why_not_owned(folder, FolderKind.RUN_PART):
                    raise ConfigError(f"run_dir: {reason}. Delete it: a start makes the portions again")
                if _read(folder / KEY_NAME) != text:
                    remove_owned(folder, FolderKind.RUN_PART)
            if is_free(folder):
                OwnedFolder.make(folder, FolderKind.RUN_PART).release()
                (folder / KEY_NAME).write_text(text)
        found = StreamFolder(spec)
        for path in {*folder.glob("source_*"), *folder.glob(FETCHED_NAME)} - set(map(found.path, found.there())):
            remove_owned(path, FolderKind.RUN_PART)
        remove_abandoned(folder)
        return found

    def path(self, portion: PortionId) -> Path:
        return self.spec.folder / f"source_{portion.source}_portion_{portion.number}"

    def files(self, portion: PortionId) -> tuple[StreamFile, ...]:
        return self.spec.sources[portion.source][1][portion.number]

    def describe(self, portion: PortionId) -> str:
        """Return what messages call a portion: its first file."""
        first, *others = self.files(portion)
        return f"{first} and {len(others)} more" if others else str(first)

    def facts(self, portion: PortionId) -> PortionFacts | None:
        """Return what is known of a portion; None if it was never made."""
        return self._facts.get(portion)

    def record(self, portion: PortionId, facts: PortionFacts, *, write: bool) -> None:
        """Note what is known of a portion. `write`: for later processes, too; else another process has done that."""
        self._facts[portion] = facts
        if write:
            line = json.dumps(asdict(portion) | facts._asdict() | {"fingerprint": asdict(facts.fingerprint)})
            with explained("write", self.spec.folder), (self.spec.folder / FACTS_NAME).open("a") as file:
                file.write(f"\n{line}\n")  # a kill may have torn the line before

    def there(self) -> list[PortionId]:
        """Return the portions that are on disk, the oldest first."""
        known = [portion for portion in self._facts if self.is_there(portion)]
        return sorted(known, key=lambda portion: (self.path(portion) / META_NAME).stat().st_mtime_ns)

    def is_there(self, portion: PortionId) -> bool:
        return portion in self._facts and (self.path(portion) / META_NAME).is_file()

    def remove(self, portion: PortionId) -> None:
        with explained("delete", self.path(portion)):
            remove_owned(self.path(portion), FolderKind.RUN_PART)

    @property
    def used_bytes(self) -> int:
        """Return the size of all files in the folder."""
        return bytes_below(self.spec.folder)

    def needed_bytes(self, portion: PortionId) -> int:
        """Return how much room a portion may take while it is made: its files, if they are fetched, and its tokens."""
        fetched = sum(file.nbytes for file in self.files(portion) if file.is_remote)
        return fetched + int(ROOM * self._token_bytes(portion))

    def make_room(self, needed_bytes: int, keep: Collection[PortionId]) -> bool:
        """Delete portions, the oldest first, until so much is free; those to `keep` stay. Return whether it is."""
        for portion in self.there():
            if self.spec.limit - self.used_bytes >= needed_bytes:
                break
            if portion not in keep:
                self.remove(portion)
        return self.spec.limit - self.used_bytes >= needed_bytes

    def check_limit(self, more_bytes: int = 0) -> None:
        """Raise CapacityError if all files, and `more_bytes`, are more than the limit."""
        if (total := self.used_bytes + more_bytes) > self.spec.limit:
            raise CapacityError(
                f"data.stream: {format_bytes(self.spec.limit)} hold no further portion: {format_bytes(total)} would be "
                f"in {self.spec.folder}; set data.stream to more, or cut the files smaller"
            )

    def check_two_fit(self) -> None:
        """Raise CapacityError unless each source has room for a portion, and one more can be made meanwhile."""
        largest = [
            max((PortionId(source, number) for number in range(len(portions))), key=self.source_bytes)
            for source, (_, portions) in enumerate(self.spec.sources)
        ]
        held = int(sum(map(self._token_bytes, largest)))
        several = [portion for portion in largest if len(self.spec.sources[portion.source][1]) > 1] or largest
        made = max(several, key=self.needed_bytes)
        if (needed := held + self.needed_bytes(made)) > self.spec.limit:
            raise CapacityError(
                f"data.stream: {format_bytes(self.spec.limit)} are too little: the largest portions of the sources "
                f"take up to {format_bytes(held)}, and {format_bytes(self.needed_bytes(made))} while the next one is "
                f"made ({self.describe(made)}): set data.stream to {format_bytes(needed)} or more, or "
                "data.stream_portion to less"
            )

    def source_bytes(self, portion: PortionId) -> int:
        """Return the size of the files of a portion."""
        return sum(file.nbytes for file in self.files(portion))

    def _token_bytes(self, portion: PortionId) -> float:
        """Estimate the size of a portion's tokens: per byte of files the most so far of its source; at first 0."""
        made = (facts for other, facts in self._facts.items() if other.source == portion.source)
        return self.source_bytes(portion) * max((facts.token_bytes / facts.source_bytes for facts in made), default=0.0)

    @cached_property
    def sources(self) -> list[SourcePortions]:
        return [SourcePortions(self, source) for source in range(len(self.spec.sources))]


class SourcePortions:
    """Holds the portions of one source (io/batching/portion_stream.py)."""

    def __init__(self, folder: StreamFolder, source: int) -> None:
        self._folder = folder
        self.source = source
        self.name, portions = folder.spec.sources[source]
        self.num_portions = len(portions)
        self.listing = listing_of(portions)

    @property
    def joins_documents(self) -> bool:
        return self._folder.spec.data.joins_documents

    @property
    def weighted(self) -> bool:
        """Return whether batches have loss weights: records of a later portion may have some."""
        return self._folder.spec.data.kind != "pretrain"

    def facts(self, number: int) -> PortionFacts | None:
        return self._folder.facts(PortionId(self.source, number))

    def is_there(self, number: int) -> bool:
        return self._folder.is_there(PortionId(self.source, number))

    def open(self, number: int) -> Windows:
        spec = self._folder.spec
        return cut_source(
            spec.data, self.name, self._folder.path(PortionId(self.source, number)), spec.vocab_size, whole=False
        )


def bytes_below(folder: Path) -> int:
    """Return the size of all files in a folder at any depth; those that are deleted meanwhile count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(Path(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _read(file: Path) -> str | None:
    return file.read_text() if file.is_file() else None


def _parsed(line: str) -> tuple[PortionId, PortionFacts] | None:
    """Return what a line of the facts says; None for one that a kill has torn."""
    try:
        tree = parse_json(line)
        portion = PortionId(tree.pop("source"), tree.pop("number"))
        return portion, PortionFacts(**tree | {"fingerprint": Fingerprint(**tree["fingerprint"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
