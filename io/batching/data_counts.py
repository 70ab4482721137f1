"""Counts what an epoch of the data holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain_ray.io.batching.windows import Windows
from megatrain_ray.io.tokens.token_files import TokenMeta, read_meta


@dataclass(frozen=True)
class DataCounts:
    """Holds what an epoch of all sources of the data has.

    num_records: records that were read; None if an earlier release made the tokens and did not count them.
    num_cut, num_dropped: those that were too long for a row, and those of which nothing is used.
    num_bad: those among them that could not be used (data.bad_records).
    longest: tokens of the longest sequence before it was cut; 0: not known.
    """

    num_records: int | None
    num_cut: int
    num_dropped: int
    num_tokens: int
    num_rows: int
    longest: int = 0
    num_bad: int = 0

    @staticmethod
    def of(folders: Sequence[Path], windows: Sequence[Windows]) -> DataCounts:
        """Count the records of token folders, and the rows of their windows."""
        metas = _metas(folders)
        return DataCounts(
            num_records=num_records(folders),
            num_cut=sum(meta.num_cut for meta in metas),
            num_dropped=sum(meta.num_dropped for meta in metas),
            num_tokens=sum(meta.num_tokens for meta in metas),
            num_rows=sum(source.num_windows for source in windows),
            longest=max((meta.longest for meta in metas), default=0),
            num_bad=sum(meta.num_bad for meta in metas),
        )

    def estimated(self, share: float) -> DataCounts:
        """Return the counts of all data if these are of a `share` of them."""
        whole = {name: round(value / share) for name in ESTIMATED if (value := getattr(self, name)) is not None}
        return replace(self, **whole)


ESTIMATED = ("num_records", "num_cut", "num_dropped", "num_bad", "num_tokens", "num_rows")


def num_records(folders: Sequence[Path]) -> int | None:
    """Return the number of records that the tokens of folders were made of; None as in DataCounts."""
    counts = [meta.num_records for meta in _metas(folders)]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _metas(folders: Sequence[Path]) -> list[TokenMeta]:
    return [meta for meta in map(read_meta, folders) if meta is not None]
