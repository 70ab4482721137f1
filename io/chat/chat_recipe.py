"""Tokenises chats once: sequences and their masks, in a folder of the token cache (tokens/token_cache.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.conversation_formats import ChatLayout
from megatrain_ray.io.chat.encode_chats import ChatEncoder, Truncation, read_chats
from megatrain_ray.io.chat.find_chats import ChatSource
from megatrain_ray.io.records.record_tally import BadRecords, ChatTally
from megatrain_ray.io.tokens.sequence_writer import SequenceFiles
from megatrain_ray.io.tokens.token_cache import TokenMeta, provenance_of
from megatrain_ray.io.tokens.token_writer import id_bytes
from megatrain_ray.io.tokens.tokenizer import load_tokenizer


@dataclass(frozen=True)
class ChatRecipe:
    """Makes sequences from chats, given files and their layouts, tokenizer, template and truncation of long chats.

    Each sequence is a document of at most `seq_len` + 1 tokens.
    """

    sources: tuple[ChatSource, ...]
    tokenizer: str
    template: ChatTemplate
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords
    num_processes: int = 1  # processes that tokenise; the sequences do not depend on it

    def provenance(self) -> dict[str, Any]:
        """Return everything that decides the tokens, as data for JSON. Raises ConfigError if a file cannot be read."""
        return {
            **provenance_of([source.file for source in self.sources], self.tokenizer),
            "layouts": [_described(source.layout) for source in self.sources],
            "template": [self.template.source, self.template.tool_use, dict(self.template.variables)],
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
        }

    def write(self, folder: Path, vocab_size: int, advance: Callable[[int, int], None]) -> TokenMeta:
        """Write the token files into `folder`. Raises ConfigError as ChatEncoder and read_chats do, and OSError."""
        tokenizer, tally = load_tokenizer(self.tokenizer), ChatTally(self.bad_records)
        files = SequenceFiles([source.file for source in self.sources], vocab_size, advance)
        sequences = read_chats(
            self.sources,
            ChatEncoder(tokenizer, self.template),
            tally,
            max_tokens=self.seq_len + 1,
            truncation=self.truncation,
            vocab_size=vocab_size,
            num_processes=self.num_processes,
        )
        with closing(sequences):
            itemsize = id_bytes(tokenizer.num_ids)
            return files.write(folder, sequences, tally, itemsize=itemsize, end=tokenizer.end_of_document)


def _described(layout: ChatLayout) -> list[Any]:
    """Return a layout as data for JSON. Sets are sorted, because their own order differs between processes."""
    assert is_dataclass(layout)
    fields = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(layout).items()}
    return [type(layout).__name__, fields]
