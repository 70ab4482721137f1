"""Chats tokenised once: sequences and their masks, in a folder as token_cache.py keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.io.chat_records import ChatLayout
from megatrain_ray.io.chat_sources import ChatSource
from megatrain_ray.io.chat_tally import BadRecords, ChatTally, Fate
from megatrain_ray.io.chat_template import ChatTemplate
from megatrain_ray.io.chats import ChatEncoder, ChatSequence, Truncation, read_chats
from megatrain_ray.io.highest_id import HighestId
from megatrain_ray.io.token_cache import TokenMeta, provenance_of
from megatrain_ray.io.token_writer import TokenWriter, id_bytes
from megatrain_ray.io.tokenizer import load_tokenizer
from megatrain_ray.io.tokens import TokenBlock


@dataclass(frozen=True)
class ChatRecipe:
    """What sequences come from: the files and how they hold chats, tokenizer and template, what is done to long ones.

    Each sequence is a document of at most `seq_len` + 1 tokens.
    """

    sources: tuple[ChatSource, ...]
    tokenizer: str
    template: ChatTemplate
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords

    def provenance(self) -> dict[str, Any]:
        """Raises ConfigError where a file cannot be read."""
        return {
            **provenance_of([source.file for source in self.sources], self.tokenizer),
            "layouts": [_described(source.layout) for source in self.sources],
            "template": [self.template.source, self.template.tool_use, dict(self.template.variables)],
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
        }

    def write(self, folder: Path, vocab_size: int, advance: Callable[[int, int], None]) -> TokenMeta:
        """Makes the files of a folder of tokens. Raises ConfigError as ChatEncoder and read_chats do, and OSError."""
        return _Making(self, vocab_size, advance).write(folder)


class _Making:
    """Chats to sequences, one at a time."""

    def __init__(self, recipe: ChatRecipe, vocab_size: int, advance: Callable[[int, int], None]) -> None:
        self._recipe = recipe
        self._vocab_size = vocab_size
        self._advance = advance
        self._total_bytes = sum(source.file.stat().st_size for source in recipe.sources)
        self._highest = HighestId(vocab_size)

    def write(self, folder: Path) -> TokenMeta:
        recipe, tally = self._recipe, ChatTally(self._recipe.bad_records)
        tokenizer = load_tokenizer(recipe.tokenizer)
        sequences = read_chats(
            recipe.sources,
            ChatEncoder(tokenizer, recipe.template),
            tally,
            max_tokens=recipe.seq_len + 1,
            truncation=recipe.truncation,
            vocab_size=self._vocab_size,
        )
        with TokenWriter(folder, id_bytes(tokenizer.num_ids), self._seen, masked=True) as writer:
            for block in self._blocks(sequences):
                writer.add(block)
            writer.finish()
        return TokenMeta(
            itemsize=id_bytes(tokenizer.num_ids),
            num_tokens=writer.num_tokens,
            num_documents=writer.num_documents,
            num_empty=0,
            num_bad=tally.counts[Fate.BAD],
            places=(),
            highest_id=self._highest.id,
            highest_file=self._highest.file,
            end_of_document=tokenizer.end_of_document,
            crc32=writer.crc32,
            num_supervised=tally.num_supervised,
            report=tuple(tally.lines()),
        )

    def _blocks(self, sequences: Iterable[ChatSequence]) -> Iterator[TokenBlock]:
        files = iter(self._recipe.sources)
        file, done_bytes, file_bytes = None, 0, 0
        for document, sequence in enumerate(sequences):
            while sequence.place.file != file:
                file, done_bytes = next(files).file, done_bytes + file_bytes
                file_bytes = file.stat().st_size
                self._highest.begin(file, document)
            yield TokenBlock(sequence.ids, True, done_bytes + sequence.place.read_bytes, sequence.supervised)

    def _seen(self, highest: int, document: int, read_bytes: int) -> None:
        self._highest.see(highest, document)
        self._advance(read_bytes, self._total_bytes)


def _described(layout: ChatLayout) -> list[Any]:
    """A layout as JSON has it. Sets are sorted: their own order is another one in each process."""
    assert is_dataclass(layout)
    fields = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(layout).items()}
    return [type(layout).__name__, fields]
