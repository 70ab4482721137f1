"""Makes a portion of a stream: fetches its files, tokenises them as any source is, and deletes what was fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatrain_ray.data.data_sources import cut_source
from megatrain_ray.data.stream_folder import FETCHED_NAME, PortionId, StreamFolder, bytes_below
from megatrain_ray.data.tokenize_data import recipe_of
from megatrain_ray.errors import ConfigError, NothingToLearnError
from megatrain_ray.io.batching.corpus import Fingerprint
from megatrain_ray.io.batching.portion_stream import PortionFacts
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import FolderKind, OwnedFolder, has_mark, remove_owned
from megatrain_ray.io.files.partial_folder import complete_or_absent, remove_abandoned
from megatrain_ray.io.records.stream_files import RETRY_WAITS_S, fetch
from megatrain_ray.io.tokens.token_cache import provenance_of, write_tokens
from megatrain_ray.io.tokens.token_files import read_meta


def make_portion(
    folder: StreamFolder, portion: PortionId, report: Callable[[str], None],
    advance: Callable[[int, int], None] = lambda read_bytes, total_bytes: None,
    waits_s: Sequence[float] = RETRY_WAITS_S,
) -> PortionFacts:  # fmt: skip
    """Make a portion, and return what is known of it. One without a window has no folder.

    report: prints a line.
    advance: is called with the bytes of its files that are tokenised, and with all.
    waits_s: as for `fetch`.

    Raises CapacityError if all portions together become larger than the limit, ConfigError for what is wrong with
    records or ids, MegatrainError if a file cannot be fetched or the disk fails.
    """
    spec, path = folder.spec, folder.path(portion)
    if has_mark(path, FolderKind.RUN_PART):  # of a process that was killed before it noted the facts
        folder.remove(portion)

    def written(read_bytes: int, total_bytes: int) -> None:
        folder.check_limit()
        advance(read_bytes, total_bytes)

    remove_abandoned(spec.folder)
    source_bytes = folder.source_bytes(portion)
    try:
        with _fetched(folder, portion, report, waits_s) as files:
            recipe = recipe_of([str(file) for file in files], spec.data, spec.tokenizer, spec.vocab_size)
            with complete_or_absent(path, FolderKind.RUN_PART) as partial:
                write_tokens(recipe, partial, spec.vocab_size, written, provenance_of(recipe))
        facts = _facts(folder, portion, source_bytes)
    except NothingToLearnError:
        report(f"nothing to learn in {folder.describe(portion)}")
        if has_mark(path, FolderKind.RUN_PART):
            folder.remove(portion)
        facts = PortionFacts(0, Fingerprint(0, 0), source_bytes, 0)
    folder.record(portion, facts, write=True)
    return facts


@contextmanager
def _fetched(
    folder: StreamFolder, portion: PortionId, report: Callable[[str], None], waits_s: Sequence[float]
) -> Iterator[list[Path]]:
    """Yield the files of a portion. Those that were fetched are deleted after the block."""
    at = folder.spec.folder / FETCHED_NAME
    with explained("make", at):
        if has_mark(at, FolderKind.RUN_PART):  # of a process that was killed
            remove_owned(at, FolderKind.RUN_PART)
        owned = OwnedFolder.make(at, FolderKind.RUN_PART)
    try:
        paths = []
        for number, file in enumerate(folder.files(portion)):
            own = at / f"{number:06}"  # names in several folders may be the same
            if file.is_remote:
                folder.check_limit(file.nbytes)
                with explained("make", own):
                    own.mkdir()
            paths.append(fetch(file, own, report, waits_s))
        yield paths
    finally:
        owned.remove()


def _facts(folder: StreamFolder, portion: PortionId, source_bytes: int) -> PortionFacts:
    """Return what is known of a portion that was just made. Raises NothingToLearnError if it has no window."""
    spec, path = folder.spec, folder.path(portion)
    meta = read_meta(path)
    if meta is None:
        raise ConfigError(f"data.path: the tokens in {path} are damaged: start again")
    windows = cut_source(spec.data, spec.sources[portion.source][0], path, spec.vocab_size, whole=False)
    fingerprint = Fingerprint(meta.num_tokens, meta.crc32[4])
    return PortionFacts(windows.num_windows, fingerprint, source_bytes, bytes_below(path))
