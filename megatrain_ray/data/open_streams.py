"""Lists the files of sources that are read as streams, and makes the first portion of each in the driver."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.urls import is_url
from megatrain_ray.console.logs import say
from megatrain_ray.console.tokenizing import reporting
from megatrain_ray.data.data_sources import sources_of
from megatrain_ray.data.data_worker import open_stream, portion_streams
from megatrain_ray.data.hub_sources import named_sources
from megatrain_ray.data.make_portion import make_portion
from megatrain_ray.data.marks_and_template import template_of, with_marks
from megatrain_ray.data.stream_folder import PortionId, StreamFolder, StreamSpec
from megatrain_ray.io.batching.portion_stream import PortionStream
from megatrain_ray.io.files.disk_errors import check_room
from megatrain_ray.io.records.file_formats import RECORD_SUFFIXES, TEXT_SUFFIXES
from megatrain_ray.io.records.find_files import describe_folders
from megatrain_ray.io.records.stream_files import FEW_WAITS_S, divide, list_files, listing_of
from megatrain_ray.io.tokens.token_files import is_whole, read_meta
from megatrain_ray.io.tokens.tokenizer import tokenizer_files
from megatrain_ray.run.run_files import STREAM_NAME
from megatrain_ray.units import format_bytes, format_quantity

PORTION_BYTES = 256_000_000  # a guess: so large that its overhead is small, and some of it fit every disk
# Settings of the data that do not decide the tokens of a portion.
NOT_OF_TOKENS = {"path", "eval_path", "eval_dataset", "stream", "stream_portion", "packing", "shuffle", "seed"}


class StreamedTokens(NamedTuple):
    """Holds a stream whose current portions are on disk.

    folders: of the current portion of each source.
    share: of the bytes of all files, what these portions are made of.
    """

    spec: StreamSpec
    folders: tuple[Path, ...]
    share: float


def open_streams(
    data: DataConfig, tokenizer: str, vocab_size: int, run_dir: Path, position: Mapping[str, Any] | None, *,
    starts_run: bool = True,
) -> StreamedTokens:  # fmt: skip
    """Make the portion of each source that the next batch is drawn from, if it is missing in `run_dir`/stream.

    position: of the save that the run goes on from; None: it begins.
    starts_run: print what became of the records, and check that the disk has room for all of data.stream.

    Raises ConfigError for what is wrong with files, tokenizer, template, ids or the position, CapacityError if
    data.stream or the disk has too little room, MegatrainError if files cannot be fetched or the disk fails.
    """
    assert data.stream is not None  # else it is read whole
    suffixes = TEXT_SUFFIXES if data.kind == "pretrain" else RECORD_SUFFIXES
    named = {name: named_sources(parts) for name, parts in sources_of(data).items()}
    sources = tuple(
        (name, divide(list_files(parts, suffixes), data.stream_portion or PORTION_BYTES))
        for name, parts in named.items()
    )
    local = [part for parts in named.values() for part in parts if isinstance(part, str) and not is_url(part)]
    for note in describe_folders(local, suffixes):
        say(note)
    template = data.chat_template and _absolute(data.chat_template)
    decided = with_marks(data, tokenizer, vocab_size).model_copy(update={"chat_template": template})
    spec = StreamSpec(
        run_dir / STREAM_NAME, data.stream, sources, decided, _absolute(tokenizer), vocab_size, dict(os.environ)
    )
    folder = StreamFolder.open(spec, _key(spec))
    if starts_run:
        advice = "free some, lower data.stream, or choose another run_dir"
        check_room(spec.folder, spec.limit - folder.used_bytes, "the portions of data.stream", advice)
    folder.check_two_fit()
    stream = open_stream(data, (), vocab_size, 1, portions=folder.sources)
    if position is not None:
        stream.seek(position)
    current: list[PortionId] = []
    for part in portion_streams(stream):
        current.append(_first_there(folder, part, current, starts_run))
    folder.check_two_fit()
    if starts_run:
        _describe(folder)
    made_bytes = sum(map(folder.source_bytes, current))
    return StreamedTokens(spec, tuple(map(folder.path, current)), made_bytes / _total_bytes(spec))


def _first_there(folder: StreamFolder, stream: PortionStream, others: Sequence[PortionId], reports: bool) -> PortionId:
    """Return the portion that the next window of a source is drawn from, made if it is missing.

    others: those of the sources before it, which are not deleted.
    """
    source = len(others)
    name, portions = folder.spec.sources[source]
    for number in stream.upcoming():  # of an earlier start
        if folder.is_there(portion := PortionId(source, number)) and not is_whole(folder.path(portion)):
            say(f"the tokens of {folder.describe(portion)} in {folder.path(portion)} are damaged: they are made again")
            folder.remove(portion)
    while True:
        portion = PortionId(source, stream.upcoming()[0])
        if folder.is_there(portion):
            break
        folder.make_room(folder.needed_bytes(portion), others)
        start_s = time.monotonic()
        with reporting(f"{name}, portion {portion.number + 1} of {len(portions)}", reports) as reporter:
            facts = make_portion(folder, portion, say, reporter.advance, FEW_WAITS_S)
            if facts.num_windows and (meta := read_meta(folder.path(portion))):
                reporter.end(meta, time.monotonic() - start_s)
    return portion


def _describe(folder: StreamFolder) -> None:
    sources, limit = [portions for _, portions in folder.spec.sources], format_bytes(folder.spec.limit)
    num_files = format_quantity(sum(len(portion) for portions in sources for portion in portions), "file")
    num_portions = format_quantity(sum(map(len, sources)), "portion")
    say(
        f"stream    {num_files} ({format_bytes(_total_bytes(folder.spec))}) in {num_portions}; at most {limit} are in "
        f"{folder.spec.folder}; what an epoch holds is estimated from the portions that are there"
    )


def _absolute(name: str) -> str:
    """Return a path that means the same to the data process, which has another working directory; else the name."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def _total_bytes(spec: StreamSpec) -> int:
    return sum(file.nbytes for _, portions in spec.sources for portion in portions for file in portion)


def _key(spec: StreamSpec) -> dict[str, Any]:
    """Return what decides the tokens of every portion, as data for JSON."""
    files = tokenizer_files(spec.tokenizer)
    return {
        "files": [listing_of(portions) for _, portions in spec.sources],
        "data": spec.data.model_dump(mode="json", exclude=NOT_OF_TOKENS),
        "tokenizer": [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files],
        "template": template_of(spec.data, spec.tokenizer).source if spec.data.has_chats else None,
    }
