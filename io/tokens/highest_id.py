"""The highest token id of a data source, and the file that has it."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from megatrain_ray.errors import ConfigError


class HighestId:
    """Looks at documents in their order. `id` is -1 before the first, `file` where it stands."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._files: list[Path] = []
        self._first_documents: list[int] = []  # of each of these
        self.id, self.file = -1, ""

    def begin(self, file: Path, document: int) -> None:
        """Documents from this number on are of `file`."""
        self._files.append(file)
        self._first_documents.append(document)

    def see(self, highest: int, document: int) -> None:
        """Raises ConfigError for an id that the model does not have."""
        if highest > self.id:
            self.id, self.file = highest, str(self._files[bisect_right(self._first_documents, document) - 1])
            self.check(self.id, self.file)

    def check(self, highest: int, where: str) -> None:
        """Raises ConfigError for an id that the model does not have."""
        if highest >= self._vocab_size:
            raise ConfigError(
                f"data.tokenizer: {where} has token id {highest}, but the model's vocab_size is {self._vocab_size}; "
                f"use the model's own tokenizer, or a model of at least {highest + 1} entries"
            )
