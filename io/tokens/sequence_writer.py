"""Writes sequences with their loss masks as a folder of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.records.read_records import Place
from megatrain_ray.io.records.record_tally import ChatTally, Fate
from megatrain_ray.io.tokens.highest_id import HighestId
from megatrain_ray.io.tokens.token_block import Mask, TokenBlock
from megatrain_ray.io.tokens.token_cache import TokenMeta
from megatrain_ray.io.tokens.token_writer import TokenWriter

TokenIds = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Holds the ids and the loss mask of one sequence, and the location of its record."""

    ids: TokenIds  # [num_tokens]
    supervised: Mask  # [num_tokens], true where the model must generate the token, so that it counts in the loss
    place: Place


class SequenceFiles:
    """Writes the sequences of some files. The sequences must come in the order of the files."""

    def __init__(self, files: Sequence[Path], vocab_size: int, advance: Callable[[int, int], None]) -> None:
        """Prepare to write the sequences of `files`.

        advance: is called with (bytes read, bytes of all files), as Watcher.advance.
        """
        self._files = files
        self._advance = advance
        self._total_bytes = sum(file.stat().st_size for file in files)
        self._highest = HighestId(vocab_size)

    def write(
        self, folder: Path, sequences: Iterable[TokenSequence], tally: ChatTally, *, itemsize: int, end: int | None
    ) -> TokenMeta:
        """Write all sequences into `folder` and return what meta.json records of them.

        tally: counts of what became of the records, complete once `sequences` is exhausted.
        itemsize: bytes of an id on disk, 2 or 4.
        end: id of the end of a document; None: the tokenizer has none.

        Raises ConfigError for an id outside the vocabulary, and OSError.
        """
        with TokenWriter(folder, itemsize, self._seen, masked=True) as writer:
            for block in self._blocks(sequences):
                writer.add(block)
            writer.finish()
        return TokenMeta.of(
            writer, self._highest, end, tally.counts[Fate.BAD],
            num_supervised=tally.num_supervised, report=tally.lines(),
        )  # fmt: skip

    def _blocks(self, sequences: Iterable[TokenSequence]) -> Iterator[TokenBlock]:
        files = iter(self._files)
        file, done_bytes, file_bytes = None, 0, 0
        for document, sequence in enumerate(sequences):
            while sequence.place.file != file:
                file, done_bytes = next(files), done_bytes + file_bytes
                file_bytes = file.stat().st_size
                self._highest.begin(file, document)
            yield TokenBlock(sequence.ids, True, done_bytes + sequence.place.read_bytes, sequence.supervised)

    def _seen(self, highest: int, document: int, read_bytes: int) -> None:
        self._highest.see(highest, document)
        self._advance(read_bytes, self._total_bytes)
